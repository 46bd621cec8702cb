"""Cascades: who answers, what it costs, and a bound that holds in simulated data as often as it says."""

import numpy as np
import pytest

from posttrain.models.binomial import THRESHOLDS
from posttrain.models.ensembles.cascade import (
    LAST_ALONE,
    choose_cascade_threshold,
    choose_models,
    cost_curve,
)


def sample(generator: np.random.Generator, count: int, last: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
    """Confidences of two models, and whether they are right: the small one as often as it says, less 0.1."""
    confidence = np.stack([generator.uniform(0.2, 1.0, count), np.full(count, 0.9)])
    small = generator.random(count) < confidence[0] - 0.1
    return confidence, np.stack([small, generator.random(count) < last])


def test_a_model_answers_from_its_threshold_on() -> None:
    confidence = np.array([[0.5, 0.7, 0.1, 0.7], [0.9, 0.1, 0.8, 0.8], [0.3, 0.3, 0.3, 0.3]])
    np.testing.assert_array_equal(choose_models(confidence, [0.7, 0.8]), [1, 0, 1, 0])
    np.testing.assert_array_equal(choose_models(confidence, [0.0, 0.0]), [0, 0, 0, 0])
    np.testing.assert_array_equal(choose_models(confidence, [LAST_ALONE, LAST_ALONE]), [2, 2, 2, 2])


def test_the_curve_by_hand() -> None:
    confidence = np.array([[0.9, 0.6, 0.3, 0.3], [1.0, 1.0, 1.0, 1.0]])
    right = np.array([[True, False, False, True], [True, True, True, False]])
    flops = np.array([[1.0, 1.0, 1.0, 1.0], [10.0, 20.0, 30.0, 40.0]])
    curve = cost_curve(confidence, right, flops, np.array([0.1, 1.0]))
    assert [point["threshold"] for point in curve] == [None, 1.0, 0.9, 0.6, 0.3]
    assert [point["accuracy"] for point in curve] == [0.75, 0.75, 0.75, 0.5, 0.5]
    assert [point["shares"] for point in curve] == [[0, 1], [0, 1], [0.25, 0.75], [0.5, 0.5], [1, 0]]
    # The last alone costs nothing else; below it every record pays for the first model.
    assert [point["flops"] for point in curve] == [25, 26, 23.5, 18.5, 1]
    np.testing.assert_allclose([point["seconds"] for point in curve], [1.0, 1.1, 0.85, 0.6, 0.1])
    np.testing.assert_allclose([point["seconds_saved"] for point in curve], [0, -0.1, 0.15, 0.4, 0.9], atol=1e-12)


def test_the_cost_never_grows_as_the_threshold_falls() -> None:
    confidence, right = sample(np.random.default_rng(0), 300)
    curve = cost_curve(confidence, right, np.stack([np.ones(300), np.full(300, 9.0)]), np.array([1.0, 9.0]))
    seconds = [point["seconds"] for point in curve[1:]]
    assert seconds == sorted(seconds, reverse=True)
    assert len(curve) > 20


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["accuracy", "tolerance"])
def test_the_bound_holds_in_simulation(goal: str) -> None:
    """The true error of the chosen threshold is above the bound in at most 5% of runs."""
    grid = (LAST_ALONE, *THRESHOLDS)
    confidence, right = sample(np.random.default_rng(99), 200_000)
    counted = ~right if goal == "accuracy" else ~right & right[1]
    rows = np.arange(len(confidence[0]))
    true_share = {t: counted[choose_models(confidence, [t]), rows].mean() for t in grid}
    bound = 0.15 if goal == "accuracy" else 0.03
    exceeded, chosen = 0, []
    for seed in range(200):
        own = sample(np.random.default_rng(seed), 400)
        options = {"accuracy": 1 - bound} if goal == "accuracy" else {"tolerance": bound}
        choice = choose_cascade_threshold(*own, **options)
        chosen.append(choice.threshold)
        exceeded += choice.shown and true_share[choice.threshold] > bound
    # 200 draws of 5% are at most 17 with a probability of 0.98.
    assert exceeded <= 17
    # It does more than nothing.
    assert np.median(chosen) < 1


def test_a_last_model_that_is_too_weak_shows_nothing() -> None:
    choice = choose_cascade_threshold(*sample(np.random.default_rng(0), 400, last=0.8), accuracy=0.9)
    assert (choice.threshold, choice.shown) == (LAST_ALONE, False)
    assert "the last model alone" in choice.why
    assert "10.0% is allowed" in choice.why


def test_too_few_records_show_nothing() -> None:
    confidence, right = np.ones((2, 10)), np.ones((2, 10), bool)
    choice = choose_cascade_threshold(confidence, right, tolerance=0.01)
    assert not choice.shown
    assert "299 records would show it" in choice.why


def test_a_perfect_small_model_answers_everything() -> None:
    confidence = np.stack([np.linspace(0.4, 1, 500), np.ones(500)])
    choice = choose_cascade_threshold(confidence, np.ones((2, 500), bool), tolerance=0.05)
    assert choice.shown
    assert choice.errors == 0
    assert choose_models(confidence, [choice.threshold]).max() == 0
