"""The utility of the nearest centroid, by running sums."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.select.value.utilities.classifier import empty_score
from posttrain.select.value.utilities.learning_task import learning_task
from posttrain.select.value.utilities.utility import Floats, Rows


class CentroidUtility:
    """The accuracy of predicting the class whose rows' mean is nearest by Euclidean distance.

    It is scikit-learn's ``NearestCentroid()``; of centroids at one distance the first class in sorted order wins. A set
    with rows of one class predicts that class. One more row costs O(D + M K). Memory: 8 bytes for each pair of a
    training row and an evaluation record.

    Args:
        features: [N, D].
        labels: [N].
        evaluation_features: [M, D].
        evaluation_labels: [M].
        empty: the score of no rows; a guess's, 1/K for K classes, where None.

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
        origin = task.features.mean(axis=0)  # distances do not depend on it, but the error of rounding does
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
        distances[present] = _distances(counts[present, None], (sums**2).sum(axis=1, keepdims=True), products)
        return self.accuracy(distances)

    def start(self) -> "_Centroids":
        """Centroids of no rows."""
        return _Centroids(self)

    def accuracy(self, distances: Floats) -> float:
        """Share of the records whose class is the nearest by distances, float64 [K, M]."""
        return float(np.count_nonzero(distances.argmin(axis=0) == self.true) / len(self.true))


class _Centroids:
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
        self._distances[label] = _distances(self._counts[label], square, self._products[label])

    def score(self) -> float:
        return self._utility.accuracy(self._distances) if self._rows else self._utility.empty


def _distances(count: Any, square: Any, products: Floats) -> Floats:
    """Squared distances less the records' own squares, of a class with ``count`` rows."""
    distances: Floats = square / count**2 - 2 / count * products
    return distances
