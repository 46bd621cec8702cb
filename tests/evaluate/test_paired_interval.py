import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.evaluate.paired_interval import paired_interval, score_interval

SCORES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=80)


def paired(better: int, worse: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    candidate = np.array([1.0] * better + [0.0] * worse + [1.0] * (n - better - worse))
    champion = np.array([0.0] * better + [1.0] * worse + [1.0] * (n - better - worse))
    return candidate, champion


def reference_statistic(difference: float, better: int, worse: int, n: int) -> float:
    """The score statistic with the restricted maximum of the likelihood found numerically, not by Tango's formula."""
    from scipy.optimize import minimize_scalar

    def loss(share: float) -> float:
        rest = 1 - 2 * share - difference
        terms = ((better, share + difference), (worse, share), (n - better - worse, rest))
        return -sum(count * math.log(max(p, 1e-300)) for count, p in terms if count)

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    share = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    variance = n * (2 * share + difference - difference**2)
    return (better - worse - n * difference) / math.sqrt(variance)


@pytest.mark.parametrize(("better", "worse", "n"), [(12, 2, 50), (1, 0, 20), (5, 9, 200), (30, 30, 100)])
def test_the_score_test_rejects_at_the_ends(better: int, worse: int, n: int) -> None:
    low, high = score_interval(better, worse, n)
    for end, sign in ((low, 1), (high, -1)):
        statistic = reference_statistic(end, better, worse, n)
        corrected = statistic * (1 - 0.25 / abs(better - worse - n * end))
        assert sign * corrected == pytest.approx(1.959964, abs=2e-4)


def test_no_differing_record_leaves_a_width() -> None:
    result = paired_interval(*paired(0, 0, 50), seed=0)
    assert (result.difference, result.n, result.differing) == (0, 50, 0)
    assert result.high == -result.low == pytest.approx(0.08035, abs=1e-5)
    # The likeliest share is 0: a difference d is rejected by n d - 1/4 > z sqrt(n d (1 - d)).
    assert 50 * result.high - 0.25 == pytest.approx(1.959964 * math.sqrt(50 * result.high * (1 - result.high)))
    assert paired_interval(*paired(0, 0, 5000), seed=0).high < 0.001


@settings(max_examples=100)
@given(SCORES, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_intervals_are_mirrored_ordered_and_bounded(scores: list[tuple[int, int]], level: float) -> None:
    candidate, champion = np.array(scores, float).T
    result = paired_interval(candidate, champion, seed=0, level=level)
    mirrored = paired_interval(champion, candidate, seed=0, level=level)
    assert (mirrored.low, mirrored.high) == pytest.approx((-result.high, -result.low))
    assert -1 <= result.low <= result.difference <= result.high <= 1
    assert result.low < result.high
    wider = paired_interval(candidate, champion, seed=0, level=(1 + level) / 2)
    assert wider.low <= result.low + 1e-9
    assert result.high <= wider.high + 1e-9


@pytest.mark.parametrize("n", [20, 50, 100])
def test_the_interval_covers_at_least_94_percent(n: int) -> None:
    """Exact: the sum of the probabilities of all outcomes whose interval holds the true difference."""
    from scipy.stats import multinomial

    outcomes = [(b, w) for b in range(n + 1) for w in range(min(n - b, 40) + 1) if b <= 40]
    ends = np.array([score_interval(b, w, n) for b, w in outcomes])
    counts = np.array([(b, w, n - b - w) for b, w in outcomes])
    for champion in (0.5, 0.8, 0.9, 0.98, 0.995):
        for change in (-0.02, 0.0, 0.02):
            candidate = min(champion + change, 1.0)
            for overlap in (0.0, 0.5):  # the share of independent errors; 0: one model's errors contain the other's
                better = overlap * candidate * (1 - champion) + (1 - overlap) * max(candidate - champion, 0)
                worse = better - (candidate - champion)
                if n * (better + worse) > 15:
                    continue
                probability = multinomial.pmf(counts, n, [better, worse, 1 - better - worse])
                true = candidate - champion
                covers = (ends[:, 0] <= true + 1e-9) & (true - 1e-9 <= ends[:, 1])
                assert probability.sum() == pytest.approx(1, abs=1e-4)
                assert probability[covers].sum() >= 0.94
                # The low end is what a gate deploys by.
                assert probability[ends[:, 0] > true + 1e-9].sum() <= 0.035


def test_other_scores_have_scipys_bootstrap() -> None:
    from scipy.stats import bootstrap

    generator = np.random.default_rng(0)
    candidate = generator.normal(0.1, size=200)
    champion = generator.normal(size=200)
    result = paired_interval(candidate, champion, seed=1, resamples=20_000)
    reference = bootstrap(
        (candidate - champion,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    error = 0.2 * np.std(candidate - champion) / np.sqrt(200)
    assert result.difference == pytest.approx(np.mean(candidate - champion))
    assert (result.low, result.high) == pytest.approx((reference.low, reference.high), abs=error)
    assert (result.n, result.differing) == (200, 200)


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_the_coverage_holds_where_few_graded_scores_differ(share: float) -> None:
    generator = np.random.default_rng(0)
    n, trials, covering = 50, 400, 0
    for trial in range(trials):
        champion = np.full(n, 0.5)
        candidate = champion - generator.random(n) * (generator.random(n) < share)
        result = paired_interval(candidate, champion, seed=trial, resamples=400)
        covering += result.low <= -share / 2 <= result.high
    assert covering / trials >= 0.93


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.integers(0, 100), st.booleans())
def test_the_order_of_the_records_does_not_matter(n: int, seed: int, binary: bool) -> None:
    generator = np.random.default_rng(seed)
    candidate, champion = (generator.integers(0, 2, n).astype(float) for _ in range(2))
    if not binary:
        candidate = candidate + generator.normal(size=n)
    order = generator.permutation(n)
    first = paired_interval(candidate, champion, seed=seed, resamples=200)
    second = paired_interval(candidate[order], champion[order], seed=seed, resamples=200)
    assert (first.low, first.high) == pytest.approx((second.low, second.high), abs=1e-12)
    assert first.low <= first.difference <= first.high


def test_unusable_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="two arrays"):
        paired_interval(np.ones(3), np.ones(2), seed=0)
    with pytest.raises(ValueError, match="no records"):
        paired_interval(np.empty(0), np.empty(0), seed=0)
    with pytest.raises(ValueError, match="finite"):
        paired_interval(np.array([np.nan]), np.ones(1), seed=0)
