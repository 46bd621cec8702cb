"""Utilities that learn a row at a time score like scikit-learn's classifiers trained from scratch."""

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


def random_data(seed: int, rows: int, width: int, classes: int, records: int = 37, origin: float = 0.0) -> Data:
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


def predictions(model: Any, data: Data, rows: np.ndarray) -> np.ndarray:
    features, labels, records, _ = data
    if len(np.unique(labels[rows])) == 1:  # which scikit-learn refuses
        return np.full(len(records), labels[rows][0])
    with np.errstate(invalid="ignore"):  # NearestCentroid also computes a variance of as many rows as classes
        return np.asarray(model.fit(features[rows], labels[rows]).predict(records))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(4, 22),
    width=st.integers(1, 12),
    classes=st.integers(2, 4),
    origin=st.sampled_from([0.0, 100.0]),
)
@pytest.mark.slow
def test_each_step_scores_like_training_from_scratch(
    kind: str, seed: int, rows: int, width: int, classes: int, origin: float
) -> None:
    make, make_classifier = KINDS[kind]
    data = random_data(seed, rows, width, classes, origin=origin)
    utility = make(*data)
    learner = utility.start()
    assert learner.score() == utility(np.zeros(0, dtype=np.int64)) == 1 / classes
    order = np.random.default_rng(seed).permutation(rows)
    for count, row in enumerate(order.tolist(), start=1):
        learner.add(row)
        expected = np.mean(predictions(make_classifier(count), data, order[:count]) == data[3])
        assert learner.score() == expected
        assert utility(order[:count]) == utility(np.sort(order[:count])) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_equal_those_of_training_from_scratch(kind: str) -> None:
    """With scikit-learn's predictions as labels the accuracy is 1."""
    make, make_classifier = KINDS[kind]
    features, labels, records, true = random_data(3, 60, 5, 3, records=300)
    order = np.random.default_rng(4).permutation(60)[:45]
    answers = predictions(make_classifier(45), (features, labels, records, true), order)
    assert len(np.unique(answers)) == 3
    utility = make(features, labels, records, answers)
    learner = utility.start()
    for row in order.tolist():
        learner.add(row)
    assert learner.score() == utility(order) == 1.0


def test_a_thousand_steps_of_ridge_do_not_drift() -> None:
    data = random_data(0, 1000, 40, 3, records=200)
    utility = RidgeUtility(*data)
    learner: Any = utility.start()
    for row in range(1000):
        learner.add(row)
    model = RidgeClassifier().fit(data[0], data[1])
    np.testing.assert_allclose(learner._weights.T, model.coef_, atol=1e-12)
    decisions = learner._decisions + (learner._intercept - learner._mean @ learner._weights)[:, None]
    np.testing.assert_allclose(decisions.T, model.decision_function(data[2]), atol=1e-12)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(2, 3))
def test_ties_of_neighbours_go_to_the_first_row_and_the_first_class(seed: int, k: int, classes: int) -> None:
    generator = np.random.default_rng(seed)
    features, records = generator.integers(0, 3, (14, 2)), generator.integers(0, 3, (9, 2))
    labels, true = np.arange(14) % classes, np.arange(9) % classes
    order = generator.permutation(14)
    utility = KNNUtility(features, labels, records, true, neighbours=k)
    learner = utility.start()
    for count, row in enumerate(order.tolist(), start=1):
        learner.add(row)
        rows = np.sort(order[:count])
        right = 0
        for record, label in zip(records, true, strict=True):
            nearest = rows[np.argsort(((features[rows] - record) ** 2).sum(axis=1), kind="stable")][:k]
            right += int(np.bincount(labels[nearest]).argmax() == label)
        assert learner.score() == utility(order[:count]) == right / 9


def test_ties_of_ridge_and_centroids_go_to_the_first_class() -> None:
    for make in (RidgeUtility, CentroidUtility):
        utility = make([[-1.0], [1.0]], [0, 1], [[0.0], [0.0], [0.0]], [0, 0, 1])
        learner = utility.start()
        learner.add(1)
        assert learner.score() == 1 / 3
        learner.add(0)
        assert learner.score() == utility(np.array([0, 1])) == 2 / 3


@pytest.mark.parametrize("k", [1, 4])
def test_likelihood_and_votes_of_neighbours_equal_those_of_scikit_learn(k: int) -> None:
    features, labels, records, true = data = random_data(5, 30, 3, 3)
    likelihood = KNNUtility(*data, neighbours=k, score="log likelihood")
    votes = KNNUtility(*data, neighbours=k, score="votes")
    assert likelihood(np.zeros(0, dtype=np.int64)) == -np.log(3)
    assert votes(np.zeros(0, dtype=np.int64)) == 0
    learners = likelihood.start(), votes.start()
    order = np.random.default_rng(6).permutation(30)
    for count, row in enumerate(order.tolist(), start=1):
        model = KNeighborsClassifier(min(k, count)).fit(features[order[:count]], labels[order[:count]])
        shares = np.zeros((len(true), 3))
        shares[:, model.classes_] = model.predict_proba(records)
        true_shares = shares[np.arange(len(true)), true]
        for learner in learners:
            learner.add(row)
        np.testing.assert_allclose(learners[0].score(), np.log(np.maximum(true_shares, 1e-6)).mean(), rtol=1e-12)
        np.testing.assert_allclose(learners[1].score(), true_shares.mean() * min(k, count) / k, rtol=1e-12)
        assert likelihood(order[:count]) == learners[0].score()
        assert votes(order[:count]) == learners[1].score()


def test_a_classifier_utility_scores_like_its_classifier() -> None:
    from sklearn.naive_bayes import GaussianNB

    features, labels, records, true = random_data(8, 40, 3, 3)
    names = np.array(["a", "b", "c"])
    data = features, names[labels], records, names[true]
    accuracy = ClassifierUtility(GaussianNB(), *data)
    likelihood = ClassifierUtility(GaussianNB(), *data, score="log likelihood")
    rows = np.arange(5, 40)
    model = GaussianNB().fit(features[rows], labels[rows])
    assert accuracy(rows) == model.score(records, true)
    np.testing.assert_allclose(likelihood(rows), -log_loss(true, model.predict_proba(records)), rtol=1e-9)
    no_rows, rows_of_one_class = np.zeros(0, dtype=np.int64), np.flatnonzero(labels == 1)
    share = float((true == 1).mean())
    assert accuracy(no_rows) == 1 / 3
    assert likelihood(no_rows) == -np.log(3)
    assert accuracy(rows_of_one_class) == share
    np.testing.assert_allclose(likelihood(rows_of_one_class), (1 - share) * np.log(1e-6))
    rows_of_two_classes = np.flatnonzero(labels != 2)
    model = GaussianNB().fit(features[rows_of_two_classes], labels[rows_of_two_classes])
    probabilities = np.c_[model.predict_proba(records), np.zeros(len(true))][np.arange(len(true)), true]
    np.testing.assert_allclose(likelihood(rows_of_two_classes), np.log(np.maximum(probabilities, 1e-6)).mean())
    assert ClassifierUtility(GaussianNB(), *data, empty=0.0)(no_rows) == 0


def test_a_random_classifier_scores_equal_sets_the_same() -> None:
    from sklearn.tree import DecisionTreeClassifier

    data = random_data(9, 60, 8, 3)
    utility = ClassifierUtility(DecisionTreeClassifier(splitter="random"), *data)
    rows = np.arange(50)
    assert len({utility(rows) for _ in range(8)}) == 1


def test_the_key_depends_on_data_and_settings() -> None:
    data = random_data(0, 20, 3, 2)
    changed = (data[0] + 1e-9, *data[1:])
    keys = [
        *(make(*data).key for make in (KNNUtility, RidgeUtility, CentroidUtility)),
        KNNUtility(*changed).key,
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
