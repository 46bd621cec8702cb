"""Learning curves on a task with many small classes."""

from dataclasses import replace

import numpy as np
import pytest

from posttrain.select.learning_curve import CurvePlan, full_accuracy, hold_out, learning_curve
from posttrain.select.strategy_comparison import compare_strategies
from posttrain.store.errors import UserError


def records(classes: int = 12, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Classes of very different sizes, so that the choice of records matters."""
    generator = np.random.default_rng(seed)
    sizes = np.linspace(8, 60, classes).astype(int)
    labels = np.repeat(np.arange(classes), sizes)
    centres = generator.normal(size=(classes, 16))
    features = centres[labels] + generator.normal(size=(len(labels), 16)) * 0.4
    return features.astype(np.float32), [f"class {label}" for label in labels]


def test_each_class_is_held_out_in_its_share() -> None:
    features, labels = records()
    task = hold_out(features, labels, 3)
    for label in range(task.classes):
        size = labels.count(sorted(set(labels))[label])
        assert (task.test_labels == label).sum() == max(1, int(0.3 * size))
    assert len(task.labels) + len(task.test_labels) == len(labels)
    np.testing.assert_allclose(np.linalg.norm(task.features, axis=1), 1, rtol=1e-5)
    other = hold_out(features, labels, 4)
    assert not np.array_equal(task.test_features, other.test_features)


def test_with_all_labels_all_strategies_end_at_the_same_accuracy() -> None:
    task = hold_out(*records(), seed=0)
    counts = (100, len(task.labels))
    ends = {name: learning_curve(task, CurvePlan(name, counts), 0)[-1] for name in ("random", "margin", "typiclust")}
    assert set(ends.values()) == {full_accuracy(task)}


def test_curves_are_reproducible() -> None:
    task = hold_out(*records(), seed=0)
    first, second = (learning_curve(task, CurvePlan("badge", (12, 24, 36)), 5) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_strategy_that_needs_no_model_starts_by_itself() -> None:
    task = hold_out(*records(), seed=0)
    curve = learning_curve(task, CurvePlan("typiclust", (12,), start="random"), 1)
    assert curve == learning_curve(task, CurvePlan("margin", (12,), start="typiclust"), 1)


def test_auto_covers_where_neighbours_share_labels_and_else_samples_at_random() -> None:
    features, labels = records()
    noise = np.random.default_rng(1).normal(size=features.shape) * 0.1
    task = hold_out(np.concatenate([features, features + noise]), [*labels, *labels], seed=0)
    covering = learning_curve(task, CurvePlan("auto", (12,)), 1)
    assert covering == learning_curve(task, CurvePlan("facility_location", (12,)), 1)
    assert covering == learning_curve(task, CurvePlan("margin", (12,)), 1), "as in the loop before a model is trained"
    shuffled = [np.random.default_rng(2).permutation(labels) for labels in (task.labels, task.test_labels)]
    task = replace(task, labels=shuffled[0], test_labels=shuffled[1])
    random = learning_curve(task, CurvePlan("auto", (12,), {"dimensions": 8}), 1)
    assert random == learning_curve(task, CurvePlan("random", (12,)), 1)


def test_with_one_class_only_it_is_always_predicted() -> None:
    task = hold_out(*records(), seed=0)
    curve = learning_curve(task, CurvePlan("random", (1, 2)), 0)
    assert curve[0] in {float((task.test_labels == label).mean()) for label in range(task.classes)}


@pytest.mark.slow
def test_covering_the_pool_beats_chance() -> None:
    features, labels = records()
    result = compare_strategies(features, labels, ["facility_location"], seeds=6, batch=12, most=48, workers=1)
    best = result.summaries[0]
    assert best.strategy == "facility_location"
    assert best.p_value is not None
    assert best.p_value < 0.05
    assert result.counts == [12, 24, 36, 48]


@pytest.mark.slow
def test_the_number_of_processes_does_not_matter() -> None:
    features, labels = records(6)
    serial, parallel = (
        compare_strategies(features, labels, ["margin"], seeds=2, batch=10, most=20, workers=count) for count in (1, 2)
    )
    assert serial == parallel


def test_unknown_strategies_and_too_few_records_are_refused() -> None:
    features, labels = records()
    with pytest.raises(UserError, match="--strategies: no strategy `margn`; did you mean `margin`"):
        compare_strategies(features, labels, ["margn"])
    with pytest.raises(UserError, match="two classes or more"):
        compare_strategies(features[:8], ["one"] * 8, ["margin"])
    with pytest.raises(UserError, match="make no batch of 1000"):
        compare_strategies(features, labels, ["margin"], batch=1000)
    with pytest.raises(UserError, match="are not of"):
        compare_strategies(features, labels[:-1], ["margin"])
