"""The utility of k nearest neighbours, updated incrementally as rows are added."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from posttrain.attribution.utilities.classifier import empty_score, mean_log_likelihood
from posttrain.attribution.utility import Rows, learning_task
from posttrain.store.errors import UserError

KNNScore = Literal["accuracy", "log likelihood", "votes"]


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
