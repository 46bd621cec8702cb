"""The utility of k nearest neighbours, updated incrementally as rows are added, and its exact Shapley values."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from posttrain.attribution.utilities.classifier import empty_score, mean_log_likelihood
from posttrain.attribution.utility import Rows, check_positive, learning_task
from posttrain.attribution.values import Floats, Values
from posttrain.store.errors import UserError

KNNScore = Literal["accuracy", "log likelihood", "votes"]

_BLOCK_PAIRS = 1 << 15  # of a training row and an evaluation record at a time: 256 KB an array, in a core's cache


class KNNUtility:
    """Scores an unweighted vote of the k nearest rows by Euclidean distance.

    It is scikit-learn's ``KNeighborsClassifier(k)`` on min(k, n) of n rows, where of rows at one distance the first in
    the training data is nearer and of classes with as many votes the first in sorted order wins. Memory: 8 bytes for
    each pair of a training row and an evaluation record.

    Args:
        features: [N, D].
        labels: [N].
        evaluation_features: [M, D].
        evaluation_labels: [M].
        neighbours: k.
        score: ``accuracy`` and ``log likelihood`` as of `ClassifierUtility`, a class's probability being its share of
            the votes. ``votes`` is the mean number of right votes by k, also where the set has fewer than k rows: the
            utility whose Shapley values `knn_shapley` gives (R. Jia et al., "Efficient task-specific data valuation for
            nearest neighbor algorithms", VLDB 2019).
        empty: the score of no rows; if None 0 by votes, else a guess's as of `ClassifierUtility`.

    Raises:
        UserError: as `learning_task`, or k is not positive.
    """

    def __init__(
        self,
        features: npt.ArrayLike,
        labels: Sequence[Any] | npt.NDArray[Any],
        evaluation_features: npt.ArrayLike,
        evaluation_labels: Sequence[Any] | npt.NDArray[Any],
        *,
        neighbours: int = 5,
        score: KNNScore = "accuracy",
        empty: float | None = None,
    ) -> None:
        from scipy.spatial.distance import cdist

        if neighbours < 1:
            raise UserError(f"{neighbours} neighbours cannot vote", fix="give at least 1")
        if score not in ("accuracy", "log likelihood", "votes"):
            raise UserError(f"no score `{score}`", fix="accuracy, log likelihood or votes")
        task = learning_task(features, labels, evaluation_features, evaluation_labels)
        self.players = len(task.labels)
        self.labels, self.true, self.classes = task.labels, task.evaluation_labels, task.classes
        self.neighbours, self.kind = neighbours, score
        guess = 0.0 if score == "votes" else empty_score(score, task.classes)
        self.empty = guess if empty is None else empty
        self.key = task.key("k nearest neighbours", neighbours, score, self.empty)
        count, records = len(task.labels), len(self.true)
        self.order = np.empty((records, count), dtype=np.int32)
        self.rank = np.empty((count, records), dtype=np.int32)
        # A record at a time: float64 distances of all pairs would take as much memory as the result. Stable, so that
        # of rows at one distance the first in the training data is nearer.
        for record in range(records):
            distances = cdist(task.evaluation_features[record : record + 1], task.features, "sqeuclidean")[0]
            self.order[record] = np.argsort(distances, kind="stable")
            self.rank[self.order[record], record] = np.arange(count)

    def __call__(self, rows: Rows) -> float:
        model = self.start()
        model.fit(rows)
        return model.score()

    def start(self) -> "_KNNVotes":
        """Returns a vote of no rows."""
        return _KNNVotes(self)


class _KNNVotes:
    def __init__(self, utility: KNNUtility) -> None:
        self._utility = utility
        absent, records = len(utility.labels), len(utility.true)
        self._rows = 0
        # The number of rows stands for no neighbour, the number of classes for its label.
        self._nearest = np.full((utility.neighbours, records), absent, dtype=np.int32)
        self._label = np.full((utility.neighbours, records), utility.classes, dtype=np.int64)
        self._furthest = np.full(records, absent, dtype=np.int32)
        self._furthest_slot = np.zeros(records, dtype=np.int64)
        self._votes = np.zeros((utility.classes + 1, records), dtype=np.int32)
        self._right = np.zeros(records, dtype=bool)
        self._count_right = 0

    def add(self, row: int) -> None:
        ranks = self._utility.rank[row]
        # Only records that have fewer than k neighbours, or a neighbour further away, change their vote.
        records = np.flatnonzero(ranks < self._furthest)
        self._rows += 1
        if not len(records):
            return
        label = self._utility.labels[row]
        slot = self._furthest_slot[records]
        self._votes[self._label[slot, records], records] -= 1
        self._votes[label, records] += 1
        self._label[slot, records] = label
        self._nearest[slot, records] = ranks[records]
        self._elect(records)

    def fit(self, rows: Rows) -> None:
        """Sets the training set at once."""
        utility, self._rows = self._utility, len(rows)
        count = min(utility.neighbours, len(rows))
        if not count:
            return
        member = np.zeros(len(utility.labels), dtype=bool)
        member[rows] = True
        records = np.arange(len(utility.true))
        width = 4 * count * len(member) // len(rows)
        # A record's k nearest of the set are among the first few columns of its order; double them until they are.
        while len(records):
            near = utility.order[records, :width]
            inside = member[near]
            position = inside.cumsum(axis=1)
            full = position[:, -1] >= count
            row, column = np.nonzero((inside & (position <= count))[full])
            slot, record = position[full][row, column] - 1, records[full][row]
            self._label[slot, record] = utility.labels[near[full][row, column]]
            self._nearest[slot, record] = column
            records, width = records[~full], width * 2
        everyone = np.arange(len(utility.true))
        for labels in self._label:
            self._votes[labels, everyone] += 1
        self._elect(everyone)

    def score(self) -> float:
        utility = self._utility
        if not self._rows:
            return utility.empty
        if utility.kind == "accuracy":
            return self._count_right / len(utility.true)
        right = self._votes[utility.true, np.arange(len(utility.true))]
        if utility.kind == "votes":
            return float(right.sum() / (utility.neighbours * len(right)))
        return mean_log_likelihood(right / min(utility.neighbours, self._rows))

    def _elect(self, records: npt.NDArray[np.int64]) -> None:
        """Updates the furthest neighbours and the votes' winners of records whose neighbours have changed."""
        nearest = self._nearest[:, records]
        slot = nearest.argmax(axis=0)
        self._furthest_slot[records] = slot
        self._furthest[records] = nearest[slot, np.arange(len(records))]
        right = self._votes[:-1, records].argmax(axis=0) == self._utility.true[records]
        self._count_right += int(right.sum()) - int(self._right[records].sum())
        self._right[records] = right


def knn_shapley(
    features: npt.ArrayLike,
    labels: Sequence[Any] | npt.NDArray[Any],
    evaluation_features: npt.ArrayLike,
    evaluation_labels: Sequence[Any] | npt.NDArray[Any],
    *,
    neighbours: int = 5,
) -> Values:
    """Computes exact Shapley values of `KNNUtility` with the score ``votes``.

    R. Jia et al., "Efficient task-specific data valuation for nearest neighbor algorithms" (VLDB 2019,
    arXiv:1908.08619), theorem 1, in O(N (D + log N)) for each evaluation record. With f(i) = min(k, i) / (i k), and
    r_j = 1 if the j-th nearest row has the record's label, the i-th nearest row is worth r_i f(i) + the sum over j > i
    of r_j (f(j) - f(j - 1)).

    Rows at equal distance share the mean over all their orders, so that equal rows have equal values. By linearity a
    row of a tie at ranks a..b is worth r m + q (f(b) - m) + the sum over j > b with r_j the mean of r_j's tie, where m
    is the mean of f over a..b and q the mean of r over the tie's other rows.

    Args:
        features: [N, D].
        labels: [N].
        evaluation_features: [M, D].
        evaluation_labels: [M].
        neighbours: k.

    Returns:
        Exact values, the mean over evaluation records; ``evaluations`` is 0, as no model is trained.

    Raises:
        UserError: as `learning_task`, or k is not positive.
    """
    from scipy.spatial.distance import cdist

    check_positive(neighbours=neighbours)
    task = learning_task(features, labels, evaluation_features, evaluation_labels)
    count, records = len(task.labels), len(task.evaluation_labels)
    totals = np.zeros(count)
    size = max(1, _BLOCK_PAIRS // count)
    for begin in range(0, records, size):
        part = slice(begin, begin + size)
        distances = cdist(task.evaluation_features[part], task.features, "sqeuclidean")
        order = np.argsort(distances, axis=1)  # not stable, as ties are shared
        right = task.labels[order] == task.evaluation_labels[part, None]
        values = _values_by_rank(np.take_along_axis(distances, order, axis=1), right, neighbours)
        totals += np.bincount(order.ravel(), values.ravel(), minlength=count)
    return Values(totals / records, np.zeros(count), 0)


def _values_by_rank(distances: Floats, right: npt.NDArray[np.bool_], neighbours: int) -> Floats:
    """Returns the values of each record's rows, float64 [B, N], by ascending distance, and which labels are right."""
    count = distances.shape[1]
    ranks = np.arange(count)
    weight = np.minimum(neighbours, ranks + 1) / ((ranks + 1) * neighbours)  # f
    change = np.diff(weight, prepend=0.0)
    correct = right.astype(np.float64)
    tied = distances[:, 1:] == distances[:, :-1]
    if not tied.any():  # embeddings seldom tie, and the ties' bookkeeping costs most of the time
        later = _suffix_sums(correct * change)
        return correct * weight + later
    edge = np.ones((len(distances), 1), dtype=bool)
    first = np.maximum.accumulate(np.where(np.hstack([edge, ~tied]), ranks, 0), axis=1)
    last = np.minimum.accumulate(np.where(np.hstack([~tied, edge]), ranks, count)[:, ::-1], axis=1)[:, ::-1]
    size = last - first + 1
    sums = np.hstack([np.zeros((len(distances), 1)), np.cumsum(correct, axis=1)])  # whole numbers: exact
    total = np.take_along_axis(sums, last + 1, axis=1) - np.take_along_axis(sums, first, axis=1)
    others = (total - correct) / np.maximum(size - 1, 1)
    weights = np.concatenate([[0.0], np.cumsum(weight)])
    mean = np.where(size > 1, (weights[last + 1] - weights[first]) / size, weight)
    later = np.take_along_axis(_suffix_sums(total / size * change), last, axis=1)
    values: Floats = correct * mean + others * np.where(size > 1, weight[last] - mean, 0.0) + later
    return values


def _suffix_sums(numbers: Floats) -> Floats:
    """Returns the sum of the numbers behind each in its row, 0 for the last."""
    sums = np.zeros_like(numbers)
    sums[:, :-1] = np.cumsum(numbers[:, :0:-1], axis=1)[:, ::-1]
    return sums
