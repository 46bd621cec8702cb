"""Which labels are wrong, and what they are taken for, from predictions made out of fold.

Confident learning of Northcutt, Jiang and Chuang, "Confident learning: estimating uncertainty in dataset labels" (JAIR
2021, arXiv:1911.00068). Everywhere: ``labels`` int64 [N] in 0..K-1, ``probabilities`` float64 [N, K], rows summing to
1, each row predicted by a model that has not learnt from it.
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
    """Mean probability of class k among the records labelled k, float64 [K]; infinite for a class without records.

    A prediction of a class is confident from here on (equation 2 of the paper).
    """
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    sums = np.bincount(labels, self_confidence(labels, probabilities), minlength=probabilities.shape[1])
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)


def confident_joint(labels: Labels, probabilities: Floats) -> Labels:
    """How many records labelled s are confidently of class y, int64 [K, K] by (s, y) (equation 1).

    A record counts for the likeliest class of those whose threshold it reaches, and not at all where it reaches none.
    """
    classes = probabilities.shape[1]
    sure = _confident_class(labels, probabilities)
    counted = sure >= 0
    pairs = np.bincount(labels[counted] * classes + sure[counted], minlength=classes * classes)
    return pairs.reshape(classes, classes).astype(np.int64)


def joint(labels: Labels, probabilities: Floats) -> Floats:
    """Estimated share of records with label s and true class y, float64 [K, K]; row s sums to the share of label s.

    Equation 3. A label of which nothing is confident is taken to be right.
    """
    classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=classes).astype(np.float64)
    pairs = confident_joint(labels, probabilities).astype(np.float64)
    pairs[np.diag_indices(classes)] += pairs.sum(axis=1) == 0
    scaled = pairs / pairs.sum(axis=1, keepdims=True) * counts[:, None]
    return np.asarray(scaled / max(1, len(labels)), dtype=np.float64)


def self_confidence(labels: Labels, probabilities: Floats) -> Floats:
    """Probability of the label that each record has, float64 [N]: the lower, the likelier is a label error."""
    return np.asarray(probabilities[np.arange(len(labels)), labels], dtype=np.float64)


def normalised_margin(labels: Labels, probabilities: Floats) -> Floats:
    """Probability of the label less the largest of the other classes, float64 [N] in [-1, 1]."""
    others = probabilities.copy()
    others[np.arange(len(labels)), labels] = -np.inf
    margin: Floats = self_confidence(labels, probabilities) - others.max(axis=1, initial=-np.inf)
    return margin


def find_label_issues(labels: Labels, probabilities: Floats, prune: PruneRule = "both") -> npt.NDArray[np.bool_]:
    """Which records are label errors, bool [N].

    A label that is also the likeliest class is none, whatever the rules of counts say; that is no part of the paper.

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
    flagged &= probabilities.argmax(axis=1) != labels
    return flagged


def _confident_class(labels: Labels, probabilities: Floats) -> Labels:
    """The likeliest class whose threshold a record reaches, int64 [N]; -1 for none."""
    reached = np.where(probabilities >= thresholds(labels, probabilities), probabilities, -1.0)
    return np.where(reached.max(axis=1, initial=-1.0) < 0, -1, reached.argmax(axis=1)).astype(np.int64)


def _round_rows(expected: Floats) -> Labels:
    """Rows of whole numbers with the sums of the rows given: rounded down, then up where most was cut off.

    Each by itself, most of the many small numbers of a joint would round to nothing.
    """
    whole = np.floor(expected + _ROUNDING).astype(np.int64)
    missing = np.rint(expected.sum(axis=1)).astype(np.int64) - whole.sum(axis=1)
    order = np.argsort(np.round(whole - expected, 9), axis=1, kind="stable")
    up = np.arange(expected.shape[1]) < missing[:, None]
    np.put_along_axis(whole, order, np.take_along_axis(whole, order, axis=1) + up, axis=1)
    return whole
