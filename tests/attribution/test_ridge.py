"""The ridge classifier that learns a row at a time scores like scikit-learn's trained from scratch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.attribution.ridge import RidgeUtility

Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def random_data(seed: int, rows: int, width: int, classes: int, records: int = 37, origin: float = 0.0) -> Data:
    """Classes that overlap, each of them in training and evaluation."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(classes, width))
    labels, true = np.arange(rows) % classes, np.arange(records) % classes
    features = centres[labels] + generator.normal(size=(rows, width)) + origin
    test_features = centres[true] + generator.normal(size=(records, width)) + origin
    return features, generator.permutation(labels), test_features, true


def predictions(data: Data, rows: np.ndarray, alpha: float) -> np.ndarray:
    from sklearn.linear_model import RidgeClassifier

    features, labels, records, _ = data
    if len(np.unique(labels[rows])) == 1:  # which scikit-learn refuses
        return np.full(len(records), labels[rows][0])
    return np.asarray(RidgeClassifier(alpha=alpha).fit(features[rows], labels[rows]).predict(records))


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
    seed: int, rows: int, width: int, classes: int, origin: float
) -> None:
    data = random_data(seed, rows, width, classes, origin=origin)
    learner = RidgeUtility(*data, alpha=0.7).start()
    assert learner.score() == 1 / classes
    order = np.random.default_rng(seed).permutation(rows)
    for count, row in enumerate(order.tolist(), start=1):
        learner.add(row)
        assert learner.score() == np.mean(predictions(data, order[:count], 0.7) == data[3])


def test_a_thousand_steps_do_not_drift() -> None:
    from sklearn.linear_model import RidgeClassifier

    data = random_data(0, 1000, 40, 3, records=200)
    learner = RidgeUtility(*data).start()
    for row in range(1000):
        learner.add(row)
    model = RidgeClassifier().fit(data[0], data[1])
    np.testing.assert_allclose(learner._weights.T, model.coef_, atol=1e-12)
    decisions = learner._decisions + (learner._intercept - learner._mean @ learner._weights)[:, None]
    np.testing.assert_allclose(decisions.T, model.decision_function(data[2]), atol=1e-12)


def test_ties_go_to_the_first_class_of_any_numbers() -> None:
    learner = RidgeUtility(np.array([[-1.0], [1.0]]), np.array([4, 7]), np.zeros((3, 1)), np.array([4, 4, 7])).start()
    learner.add(1)
    assert learner.score() == 1 / 3
    learner.add(0)
    assert learner.score() == 2 / 3
