"""Utilities of linear classifiers with cheap incremental updates: nearest centroid and ridge regression."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.attribution.utilities.classifier import empty_score
from posttrain.attribution.utility import Rows, learning_task
from posttrain.attribution.values import Floats
from posttrain.store.errors import UserError


class CentroidUtility:
    """Scores by accuracy the class whose rows' mean is nearest by Euclidean distance.

    It is scikit-learn's ``NearestCentroid()``; of centroids at one distance the first class in sorted order wins. A set
    with rows of one class predicts that class. One more row costs O(D + M K). Memory: 8 bytes for each pair of a
    training row and an evaluation record.

    Args:
        features: [N, D].
        labels: [N].
        evaluation_features: [M, D].
        evaluation_labels: [M].
        empty: the score of no rows; a guess's, 1/K for K classes, if None.

    Raises:
        UserError: as `learning_task`.
    """

    def __init__(
        self,
        features: npt.ArrayLike,
        labels: Sequence[Any] | npt.NDArray[Any],
        evaluation_features: npt.ArrayLike,
        evaluation_labels: Sequence[Any] | npt.NDArray[Any],
        *,
        empty: float | None = None,
    ) -> None:
        task = learning_task(features, labels, evaluation_features, evaluation_labels)
        self.players = len(task.labels)
        self.labels, self.true, self.classes = task.labels, task.evaluation_labels, task.classes
        # Distances do not depend on where the origin lies, but the error of rounding does.
        origin = task.features.mean(axis=0)
        self.features = task.features - origin
        self.products = self.features @ (task.evaluation_features - origin).T
        self.empty = empty_score("accuracy", task.classes) if empty is None else empty
        self.key = task.key("nearest centroid", self.empty)

    def __call__(self, rows: Rows) -> float:
        if not len(rows):
            return self.empty
        members = (self.labels[rows] == np.arange(self.classes)[:, None]).astype(np.float64)
        counts = members.sum(axis=1)
        present = counts > 0
        sums, products = (members @ self.features[rows])[present], (members @ self.products[rows])[present]
        distances = np.full((self.classes, len(self.true)), np.inf)
        distances[present] = _centroid_distances(counts[present, None], (sums**2).sum(axis=1, keepdims=True), products)
        return self.accuracy(distances)

    def start(self) -> "_IncrementalCentroids":
        """Returns centroids of no rows."""
        return _IncrementalCentroids(self)

    def accuracy(self, distances: Floats) -> float:
        """Returns the share of records whose class is the nearest by distances, float64 [K, M]."""
        return float(np.count_nonzero(distances.argmin(axis=0) == self.true) / len(self.true))


class _IncrementalCentroids:
    def __init__(self, utility: CentroidUtility) -> None:
        self._utility = utility
        self._rows = 0
        self._counts = np.zeros(utility.classes)
        self._sums = np.zeros((utility.classes, utility.features.shape[1]))
        self._products = np.zeros((utility.classes, len(utility.true)))
        self._distances = np.full((utility.classes, len(utility.true)), np.inf)

    def add(self, row: int) -> None:
        label = self._utility.labels[row]
        self._rows += 1
        self._counts[label] += 1
        self._sums[label] += self._utility.features[row]
        self._products[label] += self._utility.products[row]
        square = self._sums[label] @ self._sums[label]
        self._distances[label] = _centroid_distances(self._counts[label], square, self._products[label])

    def score(self) -> float:
        return self._utility.accuracy(self._distances) if self._rows else self._utility.empty


def _centroid_distances(count: Any, square: Any, products: Floats) -> Floats:
    """Returns squared distances to a class with ``count`` rows, less the records' own squares."""
    # |x|^2 is the same for all classes, so it does not change which is nearest.
    distances: Floats = square / count**2 - 2 / count * products
    return distances


class RidgeUtility:
    """Scores by accuracy least squares on targets of 1 for a row's class and -1 for the others, with an L2 penalty.

    It is scikit-learn's ``RidgeClassifier(alpha)``: the intercept is not penalised, and of equal decision values the
    first class in sorted order wins. A set with rows of one class predicts that class. One more row costs
    O(D^2 + M (D + K)) where a training costs O(n D^2 + D^3). The error of rounding grows with the rows added; a
    thousand rows change no decision value by more than about 1e-12 of its size if alpha is 1 and features are of
    about unit size.

    Args:
        features: [N, D].
        labels: [N].
        evaluation_features: [M, D].
        evaluation_labels: [M].
        alpha: the penalty's weight, positive.
        empty: the score of no rows; a guess's, 1/K for K classes, if None.

    Raises:
        UserError: as `learning_task`, or alpha is not positive.
    """

    def __init__(
        self,
        features: npt.ArrayLike,
        labels: Sequence[Any] | npt.NDArray[Any],
        evaluation_features: npt.ArrayLike,
        evaluation_labels: Sequence[Any] | npt.NDArray[Any],
        *,
        alpha: float = 1.0,
        empty: float | None = None,
    ) -> None:
        if not 0 < alpha < np.inf:
            raise UserError(f"alpha must be positive, and is {alpha}")
        task = learning_task(features, labels, evaluation_features, evaluation_labels)
        self.players = len(task.labels)
        self.labels, self.true, self.classes = task.labels, task.evaluation_labels, task.classes
        # Neither classifier nor accuracy depends on where the origin lies, but the error of rounding does.
        origin = task.features.mean(axis=0)
        self.features, self.records = task.features - origin, task.evaluation_features - origin
        self.targets = np.where(self.labels[:, None] == np.arange(self.classes), 1.0, -1.0)
        self.alpha = alpha
        self.empty = empty_score("accuracy", task.classes) if empty is None else empty
        self.key = task.key("ridge", alpha, self.empty)

    def __call__(self, rows: Rows) -> float:
        from scipy.linalg import cho_factor, cho_solve

        if not len(rows):
            return self.empty
        features, targets = self.features[rows], self.targets[rows]
        mean, intercept = features.mean(axis=0), targets.mean(axis=0)
        features = features - mean
        penalised = features.T @ features
        penalised[np.diag_indices(len(penalised))] += self.alpha
        weights = cho_solve(cho_factor(penalised), features.T @ (targets - intercept))
        return self.accuracy(((self.records - mean) @ weights + intercept).T)

    def start(self) -> "_IncrementalRidge":
        """Returns a regression on no rows."""
        return _IncrementalRidge(self)

    def accuracy(self, decisions: Floats) -> float:
        """Returns the share of records whose class has the greatest decision value, float64 [K, M]."""
        # A class without rows has -1 and is never the greatest: the values of P classes with rows sum to 2 - P.
        return float(np.count_nonzero(decisions.argmax(axis=0) == self.true) / len(self.true))


class _IncrementalRidge:
    """Means, weights and the inverse of the penalised scatter, each updated by one rank a row."""

    def __init__(self, utility: RidgeUtility) -> None:
        self._utility = utility
        width = utility.features.shape[1]
        self._rows = 0
        self._mean, self._intercept = np.zeros(width), np.zeros(utility.classes)
        self._weights = np.zeros((width, utility.classes))
        self._inverse = np.asfortranarray(np.eye(width) / utility.alpha)  # its upper triangle counts
        self._decisions = np.zeros((utility.classes, len(utility.true)))  # without what the means add

    def add(self, row: int) -> None:
        from scipy.linalg.blas import dsymv, dsyr

        utility, count = self._utility, self._rows
        step = utility.features[row] - self._mean
        target = utility.targets[row] - self._intercept
        # Sherman and Morrison's update of the inverse. The scatter about the mean of n + 1 rows is that of n rows plus
        # n / (n + 1) times the outer square of the new row's distance from their mean, so an intercept is no obstacle.
        if count:
            direction = dsymv(1.0, self._inverse, step)
            size = (count + 1) / count + step @ direction
            gain = direction / size
            residual = target - step @ self._weights
            self._weights += np.outer(gain, residual)
            self._decisions += np.outer(residual, utility.records @ gain)
            self._inverse = dsyr(-1 / size, direction, a=self._inverse, overwrite_a=True)
        self._rows += 1
        self._mean += step / self._rows
        self._intercept += target / self._rows

    def score(self) -> float:
        if not self._rows:
            return self._utility.empty
        constant = self._intercept - self._mean @ self._weights
        return self._utility.accuracy(self._decisions + constant[:, None])
