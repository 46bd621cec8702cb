"""Shares of a pool from samples of it."""

import numpy as np
import pyarrow as pa
import pytest

from posttrain.select.pool_sample import estimate_pool_share, sample_pool


def test_wilson_interval_of_a_plain_sample() -> None:
    """8 of 10 equally weighted records are true; the interval is the roots of (p - x)^2 = z^2 x (1 - x) / n."""
    result = estimate_pool_share(np.arange(10) < 8, np.full(10, 0.05))
    assert result is not None
    z = 1.959964
    roots = np.sort(np.roots([1 + z**2 / 10, -(2 * 0.8 + z**2 / 10), 0.8**2]))
    assert (result.value, result.drawn) == (0.8, 10)
    assert [result.low, result.high] == pytest.approx(roots.tolist(), abs=1e-9)


def test_inverse_inclusion_weights_remove_the_sampling_bias() -> None:
    """Half of a pool is true; true records are sampled four times as often, and the estimate is still unbiased."""
    generator = np.random.default_rng(0)
    true = np.arange(4000) < 2000
    inclusion = np.where(true, 0.08, 0.02)
    values, inside = [], []
    for _ in range(400):
        sampled = generator.random(4000) < inclusion
        result = estimate_pool_share(true[sampled], inclusion[sampled])
        assert result is not None
        values.append(result.value)
        inside.append(result.low <= 0.5 <= result.high)
    assert np.mean(values) == pytest.approx(0.5, abs=0.01)
    assert np.mean(inside) > 0.9


def test_an_empty_sample_gives_no_estimate() -> None:
    assert estimate_pool_share(np.zeros(0, bool), np.zeros(0)) is None


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.1, np.nan])
def test_inclusion_probabilities_outside_0_to_1_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="inclusion probability"):
        estimate_pool_share(np.ones(1, bool), np.array([wrong]))


def test_another_seed_draws_other_records() -> None:
    pool = pa.table({"id": [f"{number:03}" for number in range(100)]})
    first, again, other = (set(sample_pool(pool, 20, seed)["id"].to_pylist()) for seed in (1, 1, 2))
    assert first == again
    assert len(first & other) < 15
