"""Cross-validated values: each fold is held out once."""

from fractions import Fraction

import numpy as np
import pytest

from posttrain.attribution.knn_shapley import knn_shapley
from posttrain.attribution.valuation import ValuationMethod, check_features, cross_validated_values
from posttrain.store.errors import UserError


def blobs(count: int, classes: int = 3, seed: int = 0, spread: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(count) % classes
    generator = np.random.default_rng(seed)
    return 3 * np.eye(classes, 5)[labels] + spread * generator.normal(size=(count, 5)), labels


def test_values_are_means_over_the_folds_that_a_record_is_not_in() -> None:
    """Against the mean in exact arithmetic, with folds of different sizes."""
    features, labels = blobs(31)
    fold = np.array([0] * 12 + [1] * 10 + [2] * 9)
    result = cross_validated_values(knn_shapley, features, labels, fold)
    for row in range(31):
        fold_values = []
        for number in set(range(3)) - {int(fold[row])}:
            train_rows, held_out = np.flatnonzero(fold != number), fold == number
            values = knn_shapley(features[train_rows], labels[train_rows], features[held_out], labels[held_out])
            fold_values.append((int(held_out.sum()), Fraction(values[np.flatnonzero(train_rows == row)[0]])))
        weight = sum(size for size, _ in fold_values)
        mean = sum(size * value for size, value in fold_values) / weight
        squares = sum((Fraction(size, weight) * (value - mean)) ** 2 for size, value in fold_values)
        assert result.values[row] == pytest.approx(float(mean), rel=1e-12)
        overlap = 1 + 2 * Fraction(31, 3) / (31 - Fraction(31, 3))
        assert result.standard_errors[row] == pytest.approx(float(2 * squares * overlap) ** 0.5, rel=1e-9)


def test_errors_over_equal_folds_are_the_corrected_standard_errors() -> None:
    """A method with random values: the corrected standard error over 5 folds of 10 records of 60."""
    samples = np.random.default_rng(1).normal(size=(6, 60))
    fold = np.arange(60) // 2 % 6
    calls: list[int] = []

    def random_method(features: np.ndarray, *_: np.ndarray) -> np.ndarray:
        calls.append(len(calls))
        return samples[calls[-1], features[:, 0].astype(int)]

    result = cross_validated_values(random_method, np.arange(60.0)[:, None], np.arange(60) % 2, fold)
    for row in range(60):
        values = np.delete(samples[:, row], fold[row])
        assert result.values[row] == pytest.approx(values.mean())
        assert result.standard_errors[row] == pytest.approx(values.std(ddof=1) * np.sqrt(1 / 5 + 10 / 50))


def test_the_only_record_of_a_label_has_no_value() -> None:
    features, labels = blobs(30)
    labels[7] = 9
    result = cross_validated_values(knn_shapley, features, labels, np.arange(30) // 3 % 5)
    assert np.flatnonzero(np.isnan(result.values)).tolist() == [7]
    assert np.isnan(result.standard_errors[7])


def test_the_order_of_the_records_does_not_matter() -> None:
    features, labels = blobs(40)
    fold = np.arange(40) // 3 % 4
    order = np.random.default_rng(0).permutation(40)
    result = cross_validated_values(knn_shapley, features, labels, fold)
    shuffled = cross_validated_values(knn_shapley, features[order], labels[order], fold[order])
    np.testing.assert_allclose(result.values[order], shuffled.values, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["knn_shapley", "tmc_shapley"])
def test_wrong_labels_have_the_lowest_values(method: str) -> None:
    features, labels = blobs(60)
    wrong = [4, 17, 33, 50]
    labels[wrong] = (labels[wrong] + 1) % 3
    result = cross_validated_values(ValuationMethod(method).shapley, features, labels, np.arange(60) // 3 % 5)
    assert set(np.argsort(result.values)[:4].tolist()) == set(wrong)


def test_out_of_bag_values_need_no_folds_and_are_lowest_for_wrong_labels() -> None:
    features, labels = blobs(60)
    labels[[4, 17]] = (labels[[4, 17]] + 1) % 3
    result = ValuationMethod("data_oob", draws=100).out_of_bag(features, labels)
    assert set(np.argsort(result.values)[:2].tolist()) == {4, 17}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["knn_shapley", "tmc_shapley"])
def test_a_source_of_random_labels_has_the_lowest_value(method: str) -> None:
    features, labels = blobs(90)
    groups = np.arange(90) // 30
    noisy = groups == 1
    labels[noisy] = np.random.default_rng(0).integers(0, 3, noisy.sum())
    fold, shapley = np.arange(90) // 3 % 5, ValuationMethod(method).shapley
    result = cross_validated_values(shapley, features, labels, fold, groups)
    assert result.values.shape == (3,)
    assert result.values.argmin() == 1
    by_record = cross_validated_values(shapley, features, labels, fold).values
    means = [by_record[groups == group].mean() for group in range(3)]
    np.testing.assert_allclose(result.values, means, rtol=1e-12)


def test_labels_and_features_are_checked() -> None:
    with pytest.raises(UserError, match="no two labels have two records each"):
        cross_validated_values(knn_shapley, np.eye(4), np.zeros(4, int), np.array([0, 1, 0, 1]))
    with pytest.raises(UserError, match="not finite, first in row 2"):
        check_features(np.where(np.arange(8).reshape(4, 2) == 5, np.nan, 0))


def test_methods_are_checked() -> None:
    with pytest.raises(UserError, match="no method `tmc`"):
        ValuationMethod("tmc")
    with pytest.raises(UserError, match="draws nothing at random"):
        ValuationMethod("knn_shapley", draws=5)
