"""The expected gain of further labels, and when to stop labelling."""

import numpy as np
import pytest

from posttrain.select.stopping import ExpectedGain, StopConfig, cohen_kappa, estimate_gain, expected_gain


def _curve(labels: np.ndarray, top: float, start: float, scale: float, power: float) -> np.ndarray:
    return top - (top - start) * (1 + labels / scale) ** -power


@pytest.mark.parametrize(("top", "start", "scale", "power"), [(0.9, 0.1, 40, 1.0), (0.8, 0.5, 200, 0.5)])
def test_the_gain_of_a_known_curve_is_estimated(top: float, start: float, scale: float, power: float) -> None:
    labels = np.arange(0, 501, 100)
    result = expected_gain(labels.tolist(), _curve(labels, top, start, scale, power).tolist(), 10_000, 600)
    assert result is not None
    true = _curve(np.array([500, 600]), top, start, scale, power)
    assert result.low < true[1] - true[0] < result.hope < result.high
    assert result.gain == pytest.approx(true[1] - true[0], abs=0.01)


@pytest.mark.slow
def test_the_interval_covers_nine_of_ten_gains() -> None:
    """For curves sampled from the prior and measured on the same records, nine of ten gains are in the interval."""
    generator = np.random.default_rng(0)
    labels = np.array([0, 64, 128, 192])
    inside = []
    for _ in range(50):
        start, top = sorted(generator.random(2))
        scale, power = 5 * 1000 ** generator.random(), generator.choice([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
        true = _curve(np.append(labels, 256), top, start, scale, power)
        record_noise, training_noise = generator.normal(), generator.normal(size=5)
        measured = np.clip(true + record_noise * np.sqrt(true * (1 - true) / 300) + training_noise * 0.02, 0, 1)
        result = expected_gain(labels.tolist(), measured[:4].tolist(), 300, 256)
        assert result is not None
        inside.append((result.low <= measured[4] - measured[3] <= result.high, true[4] - true[3] <= result.hope + 1e-9))
    coverage, hope_coverage = np.mean(inside, axis=0)
    assert 0.82 < coverage < 0.98
    assert hope_coverage > 0.88


def test_more_labels_gain_more_and_few_rounds_widen_the_interval() -> None:
    values = [0.2, 0.5, 0.6, 0.65]
    labels = [0, 50, 100, 150]
    small_batch, large_batch = (expected_gain(labels, values, 500, until) for until in (160, 350))
    assert small_batch is not None
    assert large_batch is not None
    assert 0 < small_batch.gain < large_batch.gain
    early = expected_gain(labels[:2], values[:2], 500, 100)
    late = expected_gain(labels, values, 500, 200)
    assert early is not None
    assert late is not None
    assert early.high - early.low > late.high - late.low
    assert early.hope > late.hope


@pytest.mark.parametrize(("labels", "values"), [([0], [0.3]), ([0, 0], [0.3, 0.4]), ([0, 50], [-2.0, -1.0])])
def test_without_a_curve_of_shares_there_is_no_estimate(labels: list[int], values: list[float]) -> None:
    assert expected_gain(labels, values, 100, 100) is None


def test_kappa_equals_that_of_scikit_learn() -> None:
    from sklearn.metrics import cohen_kappa_score

    generator = np.random.default_rng(1)
    before, now = ([f"label {label}" for label in generator.integers(4, size=300)] for _ in range(2))
    now[:200] = before[:200]
    result = cohen_kappa(dict(with_ids(before)), dict(with_ids(now)))
    assert result == pytest.approx(cohen_kappa_score(before, now), abs=1e-12)


def with_ids(values: list[str]) -> list[tuple[str, str]]:
    return [(f"{number}", value) for number, value in enumerate(values)]


def test_kappa_uses_only_the_records_that_both_have() -> None:
    assert cohen_kappa({"a": "x", "b": "y", "c": "x"}, {"b": "y", "c": "x", "d": "z"}) == 1.0
    assert cohen_kappa({"a": "x"}, {"a": "x"}) is None
    assert cohen_kappa({"a": "x", "b": "x"}, {"a": "x", "b": "x"}) == 1.0


def test_labelling_stops_paying_where_the_largest_likely_gain_is_small() -> None:
    config = StopConfig(gain=0.01)
    low, high = (ExpectedGain(0.001, -0.04, 0.04, hope, 0.9) for hope in (0.004, 0.02))
    why = estimate_gain(config, "accuracy", 64, low, ()).why
    assert why is not None
    assert "64 labels can hardly bring 0.01 accuracy" in why
    assert estimate_gain(config, "accuracy", 64, high, ()).why is None
    assert estimate_gain(config, "accuracy", 64, None, ()).why is None


def test_labelling_stops_paying_where_champions_agree() -> None:
    config = StopConfig()
    assert estimate_gain(config, "accuracy", 64, None, (0.2, 0.99, 0.995)).why is None
    why = estimate_gain(config, "accuracy", 64, None, (0.2, 0.99, 0.995, 0.99)).why
    assert why is not None
    assert "the last 3 champions answer the pool alike" in why
    assert estimate_gain(config, "accuracy", 64, None, (0.995, 0.995)).why is None
