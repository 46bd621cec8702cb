import numpy as np
import pyarrow as pa
import pytest

from posttrain.evaluate.bootstrap import paired_scores, ratio_bootstrap, resampled_ratios
from posttrain.store.errors import WorkError


def paired_answers(
    n: int, better: float, worse: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Paired 0/1 scores whose expected difference is better - worse."""
    draw = generator.random(n)
    common = generator.random(n) < 0.5
    actual = np.where(draw < better, 1.0, np.where(draw < better + worse, 0.0, common))
    expected = np.where(draw < better, 0.0, np.where(draw < better + worse, 1.0, common))
    return actual, expected


def table(scores: dict[str, float]) -> pa.Table:
    return pa.table({"id": list(scores), "score": list(scores.values())})


def test_scores_are_paired_by_id() -> None:
    actual, expected = paired_scores(table({"x": 1.0, "y": 0.0, "z": 1.0}), table({"z": 0.0, "w": 1.0, "x": 0.5}))
    assert actual.tolist() == [1, 1]
    assert expected.tolist() == [0.5, 0]
    with pytest.raises(WorkError, match="different records"):
        paired_scores(table({"x": 1.0}), table({"y": 1.0}))


@pytest.mark.parametrize("binary", [True, False])
def test_intervals_of_ratios_equal_scipys(binary: bool) -> None:
    from scipy.stats import bootstrap

    generator = np.random.default_rng(0)
    actual, expected = paired_answers(200, 0.15, 0.08, generator)
    if not binary:
        actual, expected = actual + generator.random(200), expected + generator.random(200)

    def ratio(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(one.mean(axis=axis) / other.mean(axis=axis))

    result = ratio_bootstrap(actual, expected, seed=1, resamples=20_000)
    reference = bootstrap(
        *((actual, expected), ratio),
        **{"paired": True, "n_resamples": 20_000, "method": "percentile", "vectorized": True},
        rng=np.random.default_rng(2),
    )
    assert result.ratio == pytest.approx(actual.mean() / expected.mean())
    assert result.low == pytest.approx(reference.confidence_interval.low, abs=0.1 * reference.standard_error)
    assert result.high == pytest.approx(reference.confidence_interval.high, abs=0.1 * reference.standard_error)
    assert result.n == 200


def test_ratios_without_a_finite_value_are_never_nan() -> None:
    ones, zeros = np.ones(5), np.zeros(5)
    assert ratio_bootstrap(ones, zeros, seed=0).ratio == np.inf
    assert ratio_bootstrap(zeros, zeros, seed=0).ratio == 1
    assert set(resampled_ratios(zeros, ones, seed=0)) == {0.0}
    with pytest.raises(ValueError, match="negative scores"):
        ratio_bootstrap(-ones, ones, seed=0)
