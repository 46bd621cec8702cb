import numpy as np

from posttrain.attribution.data_oob import data_oob


def blobs(count: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    return generator.normal(size=(count, 4)) + 1.2 * labels[:, None], labels


def test_it_equals_a_direct_computation() -> None:
    from sklearn.tree import DecisionTreeClassifier

    features, labels = blobs()
    values, standard_errors = data_oob(features, labels, DecisionTreeClassifier(), bags=23, seed=9)
    outcomes: list[list[float]] = [[] for _ in labels]
    for bag in range(23):
        generator = np.random.default_rng([9, bag])
        sample = generator.integers(0, 60, 60)
        tree = DecisionTreeClassifier(random_state=int(generator.integers(2**31))).fit(features[sample], labels[sample])
        for row in set(range(60)) - set(sample.tolist()):
            outcomes[row].append(float(tree.predict(features[row : row + 1])[0] == labels[row]))
    assert min(map(len, outcomes)) > 1
    np.testing.assert_allclose(values, [np.mean(scores) for scores in outcomes], rtol=1e-12)
    errors = [np.std([*scores, 0, 1]) / np.sqrt(len(scores) + 2) for scores in outcomes]
    np.testing.assert_allclose(standard_errors, errors, atol=1e-12)
    assert 0 < standard_errors.max() < 0.5


def test_a_record_in_every_bag_has_no_value() -> None:
    from sklearn.tree import DecisionTreeClassifier

    values, errors = data_oob(*blobs(), DecisionTreeClassifier(), bags=1)
    sampled = np.isin(np.arange(60), np.random.default_rng([0, 0]).integers(0, 60, 60))
    np.testing.assert_array_equal(np.isnan(values), sampled)
    np.testing.assert_array_equal(np.isnan(errors), sampled)
    np.testing.assert_allclose(errors[~sampled], np.sqrt(2 / 9 / 3), rtol=1e-12)


def test_wrong_labels_have_lower_out_of_bag_values() -> None:
    from sklearn.tree import DecisionTreeClassifier

    features, labels = blobs(150)
    wrong_labels = labels.copy()
    wrong_labels[:20] = (wrong_labels[:20] + 1) % 3
    values, _ = data_oob(features, wrong_labels, DecisionTreeClassifier(), bags=60)
    assert values[:20].mean() < values[20:].mean() - 0.25


def test_a_bag_of_one_class_predicts_it() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.tree import DecisionTreeClassifier

    features, labels = np.arange(6.0)[:, None], np.array([0, 0, 0, 0, 0, 1])
    for estimator in (LogisticRegression(), DecisionTreeClassifier()):
        values, _ = data_oob(features, labels, estimator, bags=40)
        assert (values[:5] > 0.5).all()
        assert values[5] == 0
