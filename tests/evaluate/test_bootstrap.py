import numpy as np
import pyarrow as pa
import pytest

from posttrain.evaluate.bootstrap import paired_scores, ratio_bootstrap, resampled_means, resampled_ratios
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
    low, high = reference.confidence_interval
    if binary:  # of equal pairs some are taken to differ
        assert result.low < low < high < result.high
        assert result.high - result.low < 1.3 * (high - low)
    else:
        assert result.low == pytest.approx(low, abs=0.1 * reference.standard_error)
        assert result.high == pytest.approx(high, abs=0.1 * reference.standard_error)
    assert result.n == 200


@pytest.mark.parametrize("n", [20, 100])
@pytest.mark.parametrize(("share", "kept", "differing"), [(0.98, 0.98, 0.03), (0.99, 0.99, 0.01), (0.5, 0.9, 0.1)])
def test_intervals_of_ratios_cover_the_truth_where_few_records_differ(
    n: int, share: float, kept: float, differing: float
) -> None:
    generator = np.random.default_rng(0)
    lost = (differing + share - share * kept) / 2
    won = differing - lost
    counts = generator.multinomial(n, [share - lost, won, lost, 1 - share - won], size=200)
    pairs = np.array([[1, 1], [1, 0], [0, 1], [0, 0]], np.float64)
    intervals = [
        ratio_bootstrap(*np.repeat(pairs, outcome, axis=0).T, seed=0, resamples=500)
        for outcome in counts
        if outcome[0] + outcome[2]
    ]
    assert np.mean([interval.low <= kept <= interval.high for interval in intervals]) >= 0.94


def test_the_interval_of_a_ratio_has_a_width_where_no_record_differs() -> None:
    for scores in (np.ones(20), np.full(20, 0.5), np.repeat([0.0, 1.0], 10)):
        interval = ratio_bootstrap(scores, scores, seed=0)
        assert interval.low < 0.95 < interval.ratio == 1 < 1.05 < interval.high
    wide, narrow = (ratio_bootstrap(np.ones(n), np.ones(n), seed=0) for n in (20, 500))
    assert narrow.high - narrow.low < 0.1 * (wide.high - wide.low)


def test_ratios_without_a_finite_value_are_never_nan() -> None:
    ones, zeros = np.ones(5), np.zeros(5)
    assert ratio_bootstrap(ones, zeros, seed=0).ratio == np.inf
    assert ratio_bootstrap(zeros, zeros, seed=0).ratio == 1
    assert ratio_bootstrap(zeros, ones, seed=0).ratio == 0
    assert not np.isnan(resampled_ratios(zeros, zeros, seed=0)).any()
    with pytest.raises(ValueError, match="negative scores"):
        ratio_bootstrap(-ones, ones, seed=0)


@pytest.mark.parametrize("kinds", [5, 200])
def test_resamples_follow_the_seed(kinds: int) -> None:
    """Whether counts of few distinct values are drawn, or of many the records."""
    values = np.arange(300.0) % kinds
    weights = np.ones(300)
    first, again, other = (resampled_means(values, weights, 300, seed=seed, resamples=20) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
    assert len(set(first)) > 10
