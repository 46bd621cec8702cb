import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier

from posttrain.attribution import data_oob


def blobs(count: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    return generator.normal(size=(count, 4)) + 1.2 * labels[:, None], labels


def test_it_equals_a_direct_computation() -> None:
    features, labels = blobs()
    result = data_oob(features, labels, bags=23, seed=9, block_size=5)
    outcomes: list[list[float]] = [[] for _ in labels]
    for bag in range(23):
        generator = np.random.default_rng([9, bag])
        sample = generator.integers(0, 60, 60)
        tree = DecisionTreeClassifier(random_state=int(generator.integers(2**31))).fit(features[sample], labels[sample])
        for row in set(range(60)) - set(sample.tolist()):
            outcomes[row].append(float(tree.predict(features[row : row + 1])[0] == labels[row]))
    assert min(map(len, outcomes)) > 1
    np.testing.assert_allclose(result.values, [np.mean(scores) for scores in outcomes], rtol=1e-12)
    errors = [np.std([*scores, 0, 1]) / np.sqrt(len(scores) + 2) for scores in outcomes]
    np.testing.assert_allclose(result.standard_errors, errors, atol=1e-12)
    assert result.evaluations == 23
    assert 0 < result.standard_errors.max() < 0.5


def test_a_record_in_every_bag_has_no_value() -> None:
    features, labels = blobs()
    result = data_oob(features, labels, bags=1)
    sampled = np.isin(np.arange(60), np.random.default_rng([0, 0]).integers(0, 60, 60))
    np.testing.assert_array_equal(np.isnan(result.values), sampled)
    np.testing.assert_array_equal(np.isnan(result.standard_errors), sampled)
    np.testing.assert_allclose(result.standard_errors[~sampled], np.sqrt(2 / 9 / 3), rtol=1e-12)


def test_wrong_labels_have_lower_out_of_bag_values() -> None:
    features, labels = blobs(150)
    wrong_labels = labels.copy()
    wrong_labels[:20] = (wrong_labels[:20] + 1) % 3
    result = data_oob(features, wrong_labels, bags=60).values
    assert result[:20].mean() < result[20:].mean() - 0.25


def test_another_estimator_and_string_labels() -> None:
    features, labels = blobs()
    names = np.array(["low", "middle", "high"])[labels]
    by_number = data_oob(features, labels, estimator=LogisticRegression(), bags=15)
    by_name = data_oob(features, names, estimator=LogisticRegression(), bags=15)
    np.testing.assert_array_equal(by_number.values, by_name.values)
    assert (by_number.values != data_oob(features, labels, bags=15).values).any()


@pytest.mark.parametrize("estimator", [LogisticRegression(), None])
def test_a_bag_of_one_class_predicts_it(estimator: LogisticRegression | None) -> None:
    features, labels = np.arange(6.0)[:, None], np.array([0, 0, 0, 0, 0, 1])
    result = data_oob(features, labels, estimator=estimator, bags=40)
    assert (result.values[:5] > 0.5).all()
    assert result.values[5] == 0


@pytest.mark.slow
def test_it_stops_at_the_bound() -> None:
    features, labels = blobs()
    result = data_oob(features, labels, bags=2000, standard_error=0.05, reduction="mean", block_size=20)
    assert result.evaluations < 2000
    assert np.mean(result.standard_errors) <= 0.05
    fewer = data_oob(features, labels, bags=result.evaluations - 20)
    assert not np.mean(fewer.standard_errors) <= 0.05
