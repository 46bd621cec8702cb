"""Utilities that learn a row at a time score as scikit-learn's classifiers trained from scratch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics import log_loss
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid

from posttrain.attribution import CentroidUtility, ClassifierUtility, KNNUtility, RidgeUtility
from posttrain.attribution.utility import IncrementalUtility

Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

KINDS: dict[str, tuple[Callable[..., IncrementalUtility], Callable[[int], Any]]] = {
    "neighbours": (lambda *data: KNNUtility(*data, neighbours=3), lambda n: KNeighborsClassifier(min(3, n))),
    "one neighbour": (lambda *data: KNNUtility(*data, neighbours=1), lambda n: KNeighborsClassifier(1)),
    "ridge": (lambda *data: RidgeUtility(*data, alpha=0.7), lambda n: RidgeClassifier(alpha=0.7)),
    "centroid": (CentroidUtility, lambda n: NearestCentroid()),
}


def drawn(seed: int, rows: int, width: int, classes: int, records: int = 37, origin: float = 0.0) -> Data:
    """Classes that overlap, each of them in training and evaluation."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(classes, width))
    labels, true = np.arange(rows) % classes, np.arange(records) % classes
    features = centres[labels] + generator.normal(size=(rows, width)) + origin
    return (
        features,
        generator.permutation(labels),
        centres[true] + generator.normal(size=(records, width)) + origin,
        true,
    )


def predicted(model: Any, data: Data, rows: np.ndarray) -> np.ndarray:
    features, labels, records, _ = data
    if len(np.unique(labels[rows])) == 1:  # which scikit-learn refuses
        return np.full(len(records), labels[rows][0])
    with np.errstate(invalid="ignore"):  # NearestCentroid also computes a variance of as many rows as classes
        return np.asarray(model.fit(features[rows], labels[rows]).predict(records))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(4, 22),
    width=st.integers(1, 12),
    classes=st.integers(2, 4),
    origin=st.sampled_from([0.0, 100.0]),
)
@pytest.mark.slow
def test_each_step_scores_as_a_training(
    kind: str, seed: int, rows: int, width: int, classes: int, origin: float
) -> None:
    make, trained = KINDS[kind]
    data = drawn(seed, rows, width, classes, origin=origin)
    utility = make(*data)
    growing = utility.start()
    assert growing.score() == utility(np.zeros(0, dtype=np.int64)) == 1 / classes
    order = np.random.default_rng(seed).permutation(rows)
    for count, row in enumerate(order.tolist(), start=1):
        growing.add(row)
        expected = np.mean(predicted(trained(count), data, order[:count]) == data[3])
        assert growing.score() == expected
        assert utility(order[:count]) == utility(np.sort(order[:count])) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_prediction_is_the_trained_one(kind: str) -> None:
    """Evaluated on one record a time, with its class as predicted, each of them scores 1."""
    make, trained = KINDS[kind]
    features, labels, records, true = drawn(3, 60, 5, 3, records=300)
    order = np.random.default_rng(4).permutation(60)[:45]
    answers = predicted(trained(45), (features, labels, records, true), order)
    assert len(np.unique(answers)) == 3
    utility = make(features, labels, records, answers)
    growing = utility.start()
    for row in order.tolist():
        growing.add(row)
    assert growing.score() == utility(order) == 1.0


def test_a_thousand_steps_of_ridge_do_not_drift() -> None:
    data = drawn(0, 1000, 40, 3, records=200)
    utility = RidgeUtility(*data)
    growing: Any = utility.start()
    for row in range(1000):
        growing.add(row)
    model = RidgeClassifier().fit(data[0], data[1])
    np.testing.assert_allclose(growing._weights.T, model.coef_, atol=1e-12)
    decisions = growing._decisions + (growing._intercept - growing._mean @ growing._weights)[:, None]
    np.testing.assert_allclose(decisions.T, model.decision_function(data[2]), atol=1e-12)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(2, 3))
def test_ties_of_neighbours_go_to_the_first_row_and_the_first_class(seed: int, k: int, classes: int) -> None:
    generator = np.random.default_rng(seed)
    features, records = generator.integers(0, 3, (14, 2)), generator.integers(0, 3, (9, 2))
    labels, true = np.arange(14) % classes, np.arange(9) % classes
    order = generator.permutation(14)
    utility = KNNUtility(features, labels, records, true, neighbours=k)
    growing = utility.start()
    for count, row in enumerate(order.tolist(), start=1):
        growing.add(row)
        rows = np.sort(order[:count])
        right = 0
        for record, label in zip(records, true, strict=True):
            nearest = rows[np.argsort(((features[rows] - record) ** 2).sum(axis=1), kind="stable")][:k]
            right += int(np.bincount(labels[nearest]).argmax() == label)
        assert growing.score() == utility(order[:count]) == right / 9


def test_ties_of_ridge_and_centroids_go_to_the_first_class() -> None:
    for make in (RidgeUtility, CentroidUtility):
        utility = make([[-1.0], [1.0]], [0, 1], [[0.0], [0.0], [0.0]], [0, 0, 1])
        growing = utility.start()
        growing.add(1)
        assert growing.score() == 1 / 3
        growing.add(0)
        assert growing.score() == utility(np.array([0, 1])) == 2 / 3


@pytest.mark.parametrize("k", [1, 4])
def test_other_scores_of_neighbours(k: int) -> None:
    features, labels, records, true = data = drawn(5, 30, 3, 3)
    likelihood = KNNUtility(*data, neighbours=k, score="log likelihood")
    votes = KNNUtility(*data, neighbours=k, score="votes")
    assert likelihood(np.zeros(0, dtype=np.int64)) == -np.log(3)
    assert votes(np.zeros(0, dtype=np.int64)) == 0
    growing = likelihood.start(), votes.start()
    order = np.random.default_rng(6).permutation(30)
    for count, row in enumerate(order.tolist(), start=1):
        model = KNeighborsClassifier(min(k, count)).fit(features[order[:count]], labels[order[:count]])
        shares = np.zeros((len(true), 3))
        shares[:, model.classes_] = model.predict_proba(records)
        own = shares[np.arange(len(true)), true]
        for item in growing:
            item.add(row)
        np.testing.assert_allclose(growing[0].score(), np.log(np.maximum(own, 1e-6)).mean(), rtol=1e-12)
        np.testing.assert_allclose(growing[1].score(), own.mean() * min(k, count) / k, rtol=1e-12)
        assert likelihood(order[:count]) == growing[0].score()
        assert votes(order[:count]) == growing[1].score()


def test_any_classifier_from_scratch() -> None:
    from sklearn.naive_bayes import GaussianNB

    features, labels, records, true = drawn(8, 40, 3, 3)
    names = np.array(["a", "b", "c"])
    data = features, names[labels], records, names[true]
    accuracy = ClassifierUtility(GaussianNB(), *data)
    likelihood = ClassifierUtility(GaussianNB(), *data, score="log likelihood")
    rows = np.arange(5, 40)
    model = GaussianNB().fit(features[rows], labels[rows])
    assert accuracy(rows) == model.score(records, true)
    np.testing.assert_allclose(likelihood(rows), -log_loss(true, model.predict_proba(records)), rtol=1e-9)
    nothing, single = np.zeros(0, dtype=np.int64), np.flatnonzero(labels == 1)
    share = float((true == 1).mean())
    assert accuracy(nothing) == 1 / 3
    assert likelihood(nothing) == -np.log(3)
    assert accuracy(single) == share
    np.testing.assert_allclose(likelihood(single), (1 - share) * np.log(1e-6))
    without = np.flatnonzero(labels != 2)
    model = GaussianNB().fit(features[without], labels[without])
    probabilities = np.c_[model.predict_proba(records), np.zeros(len(true))][np.arange(len(true)), true]
    np.testing.assert_allclose(likelihood(without), np.log(np.maximum(probabilities, 1e-6)).mean())
    assert ClassifierUtility(GaussianNB(), *data, empty=0.0)(nothing) == 0


def test_one_set_always_scores_the_same() -> None:
    from sklearn.tree import DecisionTreeClassifier

    data = drawn(9, 60, 8, 3)
    utility = ClassifierUtility(DecisionTreeClassifier(splitter="random"), *data)
    rows = np.arange(50)
    assert len({utility(rows) for _ in range(8)}) == 1


def test_the_key_tells_data_and_settings() -> None:
    data = drawn(0, 20, 3, 2)
    moved = (data[0] + 1e-9, *data[1:])
    keys = [
        *(make(*data).key for make in (KNNUtility, RidgeUtility, CentroidUtility)),
        KNNUtility(*moved).key,
        KNNUtility(*data, neighbours=4).key,
        KNNUtility(*data, score="votes").key,
        KNNUtility(*data, empty=0.25).key,
        RidgeUtility(*data, alpha=2).key,
        ClassifierUtility(RidgeClassifier(), *data).key,
        ClassifierUtility(RidgeClassifier(alpha=2), *data).key,
    ]
    assert len(set(keys)) == len(keys)
    assert KNNUtility(*data).key == keys[0]
    assert ClassifierUtility(RidgeClassifier(), *data).key == keys[-2]
