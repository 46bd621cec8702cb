"""Finds label errors in out-of-fold predictions by confident learning.

The method of Northcutt, Jiang and Chuang, "Confident learning: estimating uncertainty in dataset labels" (JAIR
2021, arXiv:1911.00068). Everywhere: ``labels`` int64 [N] in 0..K-1, ``probabilities`` float64 [N, K], rows summing to
1, each row predicted by a model that has not learned from it.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PruneRule = Literal["noise rate", "class", "both", "confident"]
"""The paper's rules, by the names of its section 3.2: PBNR, PBC, C+NR and the confident joint itself."""

_ROUNDING = 1e-9


def thresholds(labels: Labels, probabilities: Floats) -> Floats:
    """Returns the mean probability of class k among the records labelled k, float64 [K]; infinite without records.

    A prediction at or above the threshold of its class is confident (equation 2 of the paper).
    """
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    sums = np.bincount(labels, self_confidence(labels, probabilities), minlength=probabilities.shape[1])
    # No prediction is confident for a class without records: infinity is never reached.
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)


def confident_joint(labels: Labels, probabilities: Floats) -> Labels:
    """Counts the records labelled s that are confidently of class y, int64 [K, K] by (s, y) (equation 1).

    A record counts for the most likely class whose threshold it reaches, and not at all if it reaches none.
    """
    classes = probabilities.shape[1]
    sure = _confident_class(labels, probabilities)
    counted = sure >= 0
    pairs = np.bincount(labels[counted] * classes + sure[counted], minlength=classes * classes)
    return pairs.reshape(classes, classes).astype(np.int64)


def joint(labels: Labels, probabilities: Floats) -> Floats:
    """Estimates the share of records with label s and true class y, float64 [K, K]; row s sums to the share of label s.

    Equation 3. A label without confident predictions is assumed to be right.
    """
    classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=classes).astype(np.float64)
    pairs = confident_joint(labels, probabilities).astype(np.float64)
    # A label without any confident prediction would divide by zero below; it is assumed to be right.
    pairs[np.diag_indices(classes)] += pairs.sum(axis=1) == 0
    scaled = pairs / pairs.sum(axis=1, keepdims=True) * counts[:, None]
    return np.asarray(scaled / max(1, len(labels)), dtype=np.float64)


def self_confidence(labels: Labels, probabilities: Floats) -> Floats:
    """Returns the probability of each record's label, float64 [N]; low values suggest a label error."""
    return np.asarray(probabilities[np.arange(len(labels)), labels], dtype=np.float64)


def normalised_margin(labels: Labels, probabilities: Floats) -> Floats:
    """Returns the probability of the label minus the largest of the other classes, float64 [N] in [-1, 1]."""
    others = probabilities.copy()
    others[np.arange(len(labels)), labels] = -np.inf
    margin: Floats = self_confidence(labels, probabilities) - others.max(axis=1, initial=-np.inf)
    return margin


def find_label_issues(labels: Labels, probabilities: Floats, prune: PruneRule = "both") -> npt.NDArray[np.bool_]:
    """Finds the records that are label errors, bool [N].

    Unlike in the paper, a label that is also the most likely class is never an error, whatever the counts say.

    Args:
        prune: ``noise rate``: of every pair (s, y), as many records labelled s as the joint says are y, those with the
            largest margin of y over s. ``class``: of every label, as many as the joint says are of other classes, those
            of the lowest self-confidence. ``both``: what both rules name. ``confident``: those off the confident
            joint's diagonal. Of equal records the first goes.
    """
    if prune == "both":
        return find_label_issues(labels, probabilities, "noise rate") & find_label_issues(
            labels, probabilities, "class"
        )
    if not len(labels):
        return np.zeros(0, dtype=bool)
    if prune == "confident":
        sure = _confident_class(labels, probabilities)
        return np.asarray((sure >= 0) & (sure != labels))
    expected = _round_rows(joint(labels, probabilities) * len(labels))
    np.fill_diagonal(expected, 0)
    flagged = np.zeros(len(labels), dtype=bool)
    for label in np.flatnonzero(expected.sum(axis=1) > 0).tolist():
        rows = np.flatnonzero(labels == label)
        own = probabilities[rows, label]
        if prune == "class":
            flagged[rows[np.argsort(own, kind="stable")[: expected[label].sum()]]] = True
            continue
        for other in np.flatnonzero(expected[label]).tolist():
            by_margin = np.argsort(own - probabilities[rows, other], kind="stable")
            flagged[rows[by_margin[: expected[label, other]]]] = True
    # Counts are estimates: without this, a label that every prediction agrees with may fill up its class's count.
    flagged &= probabilities.argmax(axis=1) != labels
    return flagged


def _confident_class(labels: Labels, probabilities: Floats) -> Labels:
    """Returns the most likely class whose threshold a record reaches, int64 [N]; -1 for none."""
    reached = np.where(probabilities >= thresholds(labels, probabilities), probabilities, -1.0)
    return np.where(reached.max(axis=1, initial=-1.0) < 0, -1, reached.argmax(axis=1)).astype(np.int64)


def _round_rows(expected: Floats) -> Labels:
    """Round each row to integers with the same sum: down, then up where the remainder is largest."""
    # Rounded one by one, most of the many small entries of a joint would become 0.
    whole = np.floor(expected + _ROUNDING).astype(np.int64)
    missing = np.rint(expected.sum(axis=1)).astype(np.int64) - whole.sum(axis=1)
    order = np.argsort(np.round(whole - expected, 9), axis=1, kind="stable")
    up = np.arange(expected.shape[1]) < missing[:, None]
    np.put_along_axis(whole, order, np.take_along_axis(whole, order, axis=1) + up, axis=1)
    return whole
