"""Exact Shapley values of the k-nearest-neighbour vote."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.attribution.utility import Floats, check_positive, learning_task
from posttrain.attribution.values import Values

_BLOCK_PAIRS = 1 << 15  # of a training row and an evaluation record at a time: 256 KB an array, in a core's cache


def knn_shapley(
    features: npt.ArrayLike,
    labels: Sequence[Any] | npt.NDArray[Any],
    evaluation_features: npt.ArrayLike,
    evaluation_labels: Sequence[Any] | npt.NDArray[Any],
    *,
    neighbours: int = 5,
) -> Values:
    """Exact Shapley values of `KNNUtility` with the score ``votes``, in O(N (D + log N)) for each evaluation record.

    R. Jia et al., "Efficient task-specific data valuation for nearest neighbor algorithms" (VLDB 2019,
    arXiv:1908.08619), theorem 1. With f(i) = min(k, i) / (i k) and r_j = 1 where the j-th nearest row has the record's
    label, it says that the i-th nearest row is worth r_i f(i) + sum over j > i of r_j (f(j) - f(j - 1)).

    Rows at one distance stand in random order, as k-nearest-neighbours has no reason for another: the value is the mean
    over all their orders, so that rows that are equal are worth the same. It takes no sampling, as a row of a tie at
    places a..b is worth, by linearity, r m + q (f(b) - m) + the sum over j > b with r_j the mean of r_j's tie, where m
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
        worth = _values_by_rank(np.take_along_axis(distances, order, axis=1), right, neighbours)
        totals += np.bincount(order.ravel(), worth.ravel(), minlength=count)
    return Values(totals / records, np.zeros(count), 0)


def _values_by_rank(distances: Floats, right: npt.NDArray[np.bool_], neighbours: int) -> Floats:
    """Worth of the rows of each record, float64 [B, N], from their ascending distances and labels that are right."""
    count = distances.shape[1]
    places = np.arange(count)
    weight = np.minimum(neighbours, places + 1) / ((places + 1) * neighbours)  # f
    change = np.diff(weight, prepend=0.0)
    correct = right.astype(np.float64)
    tied = distances[:, 1:] == distances[:, :-1]
    if not tied.any():
        later = _suffix_sums(correct * change)
        return correct * weight + later
    edge = np.ones((len(distances), 1), dtype=bool)
    first = np.maximum.accumulate(np.where(np.hstack([edge, ~tied]), places, 0), axis=1)
    last = np.minimum.accumulate(np.where(np.hstack([~tied, edge]), places, count)[:, ::-1], axis=1)[:, ::-1]
    size = last - first + 1
    sums = np.hstack([np.zeros((len(distances), 1)), np.cumsum(correct, axis=1)])  # whole numbers: exact
    total = np.take_along_axis(sums, last + 1, axis=1) - np.take_along_axis(sums, first, axis=1)
    others = (total - correct) / np.maximum(size - 1, 1)
    weights = np.concatenate([[0.0], np.cumsum(weight)])
    mean = np.where(size > 1, (weights[last + 1] - weights[first]) / size, weight)
    later = np.take_along_axis(_suffix_sums(total / size * change), last, axis=1)
    worth: Floats = correct * mean + others * np.where(size > 1, weight[last] - mean, 0.0) + later
    return worth


def _suffix_sums(numbers: Floats) -> Floats:
    """Sum of the numbers behind each in its row, 0 for the last."""
    sums = np.zeros_like(numbers)
    sums[:, :-1] = np.cumsum(numbers[:, :0:-1], axis=1)[:, ::-1]
    return sums
