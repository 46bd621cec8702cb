"""Acceptance: exact intervals, and a bound on the error that holds in simulated data as often as it says."""

from functools import cache

import numpy as np
import pytest

from posttrain.label.acceptance import Acceptance, choose_threshold, draw_checks
from posttrain.models.binomial import LEVEL, THRESHOLDS, clopper_pearson, needed_answers


@pytest.mark.parametrize(("errors", "count"), [(0, 1), (0, 149), (1, 1), (3, 200), (7, 9), (150, 150)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_the_interval_is_scipys(errors: int, count: int, level: float) -> None:
    from scipy.stats import binomtest

    expected = binomtest(errors, count).proportion_ci(level, method="exact")
    assert clopper_pearson(errors, count, level) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_interval_of_nothing_is_everything() -> None:
    assert clopper_pearson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("bound", [0.01, 0.02, 0.05, 0.3])
@pytest.mark.parametrize("errors", [0, 1, 2])
def test_the_fewest_answers_that_show_a_bound(bound: float, errors: int) -> None:
    from scipy.stats import binom

    count = needed_answers(bound, errors)
    # The binomial test itself: so few errors are rarer than 5% at the bound, and were not with one answer less.
    assert binom.cdf(errors, count, bound) <= 1 - LEVEL < binom.cdf(errors, count - 1, bound)


def answers(count: int, rng: np.random.Generator, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Confidences, and answers that are right with that probability, or ``shift`` less: an overconfident model."""
    confidence = rng.beta(4, 0.5, size=count)
    return confidence, rng.random(count) < np.clip(confidence - shift, 0, 1)


@cache
def many_confidences() -> np.ndarray:
    return answers(400_000, np.random.default_rng(5))[0]


def true_error(threshold: float, shift: float) -> float:
    confidence = many_confidences()
    return float(1 - np.clip(confidence[confidence >= threshold] - shift, 0, 1).mean())


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "shift"), [(0.05, 0.0), (0.05, 0.03), (0.02, 0.0), (0.1, 0.08), (0.1, 0.3)])
@pytest.mark.parametrize("count", [200, 700])
def test_the_bound_holds_in_nineteen_of_twenty_datasets(bound: float, shift: float, count: int) -> None:
    from scipy.stats import binom

    errors = {threshold: true_error(threshold, shift) for threshold in THRESHOLDS[1:]} | {1.0: 0.0}
    simulations, broken = 300, 0
    for seed in range(simulations):
        threshold = choose_threshold(*answers(count, np.random.default_rng(seed), shift), bound).threshold
        broken += threshold is not None and errors[threshold] > bound
    # At most 5%, and what chance adds to that in so many simulations.
    assert broken <= binom.ppf(0.999, simulations, 1 - LEVEL)


def test_many_labels_accept_nearly_as_much_as_may_be() -> None:
    acceptance = choose_threshold(*answers(20_000, np.random.default_rng(1)), 0.05)
    assert acceptance.threshold is not None
    assert 0.035 < true_error(acceptance.threshold, 0) <= 0.05
    assert acceptance.why.startswith(f"of {acceptance.answers} held-out answers at a confidence of ")


def test_too_few_labels_accept_nothing_and_say_why() -> None:
    sure = np.full(148, 0.99999)
    refused = choose_threshold(sure, np.ones(148, bool), 0.02)
    assert refused.threshold is None
    assert refused.why == "nothing is accepted: 148 held-out answers are too few: 149 without an error would show 2.0%"
    assert not refused.accepts(sure).any()
    accepted = choose_threshold(np.full(149, 0.99999), np.ones(149, bool), 0.02)
    assert accepted.threshold is not None
    assert accepted.accepts(np.array([0.2, 0.99999])).tolist() == [False, True]
    at = accepted.threshold
    assert accepted.accepts(np.array([np.nextafter(at, 0), at])).tolist() == [False, True]
    assert choose_threshold(np.zeros(0), np.zeros(0, bool), 0.02).threshold is None


def test_noisy_answers_accept_nothing_and_say_why() -> None:
    right = np.arange(1000) % 5 != 0
    refused = choose_threshold(np.full(1000, 0.99), right, 0.02)
    assert refused.threshold is None
    assert "nothing is accepted: of 1000 held-out answers at a confidence of 0.99 or more, 200 are wrong" in refused.why
    assert (refused.answers, refused.errors) == (1000, 200)


def test_a_lower_threshold_is_not_tried_behind_one_that_fails() -> None:
    # The surest answers are wrong, all others right: the pooled error at a low threshold is under the bound.
    confidence = np.repeat([0.995, 0.5], [400, 4000])
    right = np.repeat([False, True], [40, 4360])
    assert (~right).mean() < 0.01
    assert choose_threshold(confidence, right, 0.02).threshold is None


def held_out() -> tuple[np.ndarray, np.ndarray]:
    confidence = np.linspace(0.6, 0.9999, 4000)
    return confidence, np.ones(4000, bool)


def test_checks_raise_the_threshold_or_end_acceptance() -> None:
    plain = choose_threshold(*held_out(), 0.02)
    assert plain.threshold is not None
    assert plain.threshold == 0.6
    agreeing = choose_threshold(*held_out(), 0.02, checked=(np.full(50, 0.7), np.ones(50, bool)))
    assert agreeing == plain
    # Below 0.9 half of the checked answers are wrong, above none.
    checked = (np.repeat([0.7, 0.95], 30), np.repeat([False, True], [15, 45]))
    raised = choose_threshold(*held_out(), 0.02, checked=checked)
    assert raised.threshold == 0.71
    assert f"raised from {plain.threshold:g}, as checks of what was accepted contradict it" in raised.why
    ended = choose_threshold(*held_out(), 0.02, checked=(np.full(30, 1.0), np.arange(30) % 2 == 0))
    assert ended.threshold is None
    assert "people found 15 of 30 checked answers wrong, and 2.0% is allowed" in ended.why


def test_a_single_wrong_check_of_many_contradicts_nothing() -> None:
    checked = (np.full(60, 0.99), np.arange(60) > 0)
    assert choose_threshold(*held_out(), 0.02, checked=checked) == choose_threshold(*held_out(), 0.02)


@pytest.mark.parametrize(
    ("accepted", "share", "drawn"), [(100, 0.1, 10), (3, 0.1, 1), (0, 0.1, 0), (5, 0, 0), (7, 1, 7)]
)
def test_checks_are_drawn_among_the_accepted(accepted: int, share: float, drawn: int) -> None:
    mask = np.random.default_rng(0).permutation(np.arange(200) < accepted)
    checks = draw_checks(mask, share, seed=3)
    assert checks.sum() == drawn
    assert not (checks & ~mask).any()
    assert (draw_checks(mask, share, seed=3) == checks).all()


def test_each_accepted_answer_is_checked_as_often() -> None:
    counts = sum(draw_checks(np.ones(20, bool), 0.25, seed).astype(int) for seed in range(2000))
    assert np.abs(np.asarray(counts) / 2000 - 0.25).max() < 0.05


def test_acceptance_is_json() -> None:
    assert Acceptance(**choose_threshold(*held_out(), 0.02).to_json()) == choose_threshold(*held_out(), 0.02)
