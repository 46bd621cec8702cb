"""Exact Shapley values of the votes of the k nearest neighbours."""

import numpy as np
import numpy.typing as npt

from posttrain.attribution.blocks import Floats, Rows

_BLOCK_PAIRS = 1 << 15  # of a training row and an evaluation record at a time: 256 KB an array, in a core's cache


def knn_shapley(
    features: Floats, labels: Rows, evaluation_features: Floats, evaluation_labels: Rows, *, neighbours: int = 5
) -> Floats:
    """Computes exact Shapley values of an unweighted vote of the k nearest rows by Euclidean distance.

    The utility of a set of rows is the mean number of right votes by k, also where the set has fewer than k rows
    (R. Jia et al., "Efficient task-specific data valuation for nearest neighbor algorithms", VLDB 2019,
    arXiv:1908.08619), and takes O(N (D + log N)) for each evaluation record by their theorem 1. With
    f(i) = min(k, i) / (i k), and r_j = 1 if the j-th nearest row has the record's label, the i-th nearest row is worth
    r_i f(i) + the sum over j > i of r_j (f(j) - f(j - 1)).

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
        [N], the mean over the evaluation records.
    """
    from scipy.spatial.distance import cdist

    count, records = len(labels), len(evaluation_labels)
    totals = np.zeros(count)
    size = max(1, _BLOCK_PAIRS // count)
    for begin in range(0, records, size):
        part = slice(begin, begin + size)
        distances = cdist(evaluation_features[part], features, "sqeuclidean")
        order = np.argsort(distances, axis=1)  # not stable, as ties are shared
        right = labels[order] == evaluation_labels[part, None]
        values = _values_by_rank(np.take_along_axis(distances, order, axis=1), right, neighbours)
        totals += np.bincount(order.ravel(), values.ravel(), minlength=count)
    return totals / records


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
