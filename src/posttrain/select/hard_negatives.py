"""Finds hard negatives: labelled records of another label nearby, and pool records between two labels.

A hard negative of a record is its nearest labelled neighbour of another label, of one that the model confuses with the
record's own where there are any (as the hard negatives of Schroff, Kalenichenko, Philbin, FaceNet, CVPR 2015, section
3.2, and Xiong et al., ANCE, ICLR 2021, arXiv:2007.00808, are the nearest by the present model). Test errors name pairs
of labels here, and a region; texts and answers of test records stay out of it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.select.hard_cases import MAX_HARD_CASES, NEIGHBOURS
from posttrain.select.selectors.similarity import Floats, blocks, whiten

Confusions = Mapping[tuple[str, str], int]
"""Number of errors by pair of labels, in alphabetical order, whichever was right; most first, ties by name."""


def confused_labels(predictions: pa.Table, labels: Sequence[str], limit: int = MAX_HARD_CASES) -> Confusions:
    """Counts the errors of an evaluation by pair of labels; the most frequent ``limit`` pairs.

    Args:
        predictions: ``expected`` and ``predicted`` of each record.
        labels: the closed label set; answers outside it are of no pair.
    """
    known = set(labels)
    pairs = zip(predictions["expected"].to_pylist(), predictions["predicted"].to_pylist(), strict=True)
    counts = Counter((min(pair), max(pair)) for pair in pairs if known.issuperset(pair) and pair[0] != pair[1])
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:limit])


@dataclass(frozen=True)
class HardNegatives:
    """The hard negative of each of N records.

    Attributes:
        rows: int64 [N], its row; -1 where no record has another label.
        similarity: float32 [N], cosine of the whitened embeddings; NaN without one.
        is_confused: bool [N], whether its label and the record's own are confused.
    """

    rows: npt.NDArray[np.int64]
    similarity: npt.NDArray[np.float32]
    is_confused: npt.NDArray[np.bool_]


def hard_negatives(
    embeddings: npt.NDArray[np.floating], labels: Sequence[str], confusions: Confusions
) -> HardNegatives:
    """Finds the hard negative of each record; ties by row.

    Args:
        embeddings: float [N, D], of labelled records.
        labels: [N].
        confusions: the pairs of labels that the model confuses. A record whose label is in none, or in none of which
            another record is, gets the nearest one of any other label.
    """
    names, codes = np.unique(np.array(labels, dtype=str), return_inverse=True)
    confused = _confusion_matrix(names, confusions)
    has_partner = np.asarray(confused.any(axis=1))
    allowed = np.where(has_partner[:, None], confused, ~np.eye(len(names), dtype=bool))
    rows, similarity = np.full(len(codes), -1, np.int64), np.full(len(codes), np.nan, np.float32)
    if len(names) > 1:
        points = whiten(embeddings)
        for part in blocks(len(codes), _rows_per_block(len(codes))):
            cosines = np.where(allowed[codes[part]][:, codes], points[part] @ points.T, -np.inf)
            rows[part] = cosines.argmax(axis=1)
            similarity[part] = cosines.max(axis=1)
    return HardNegatives(rows, similarity, has_partner[codes] if len(names) else np.zeros(0, bool))


@dataclass(frozen=True)
class BoundaryRecord:
    """A pool record between labelled records of two labels that the model confuses.

    Attributes:
        row: its row.
        labels: the labels, the nearer first.
        ratio: distance to the nearer one over that to the other, from 0 to 1; 1 is half-way.
    """

    row: int
    labels: tuple[str, str]
    ratio: float


def boundary_records(
    pool: npt.NDArray[np.floating],
    labelled: npt.NDArray[np.floating],
    labels: Sequence[str],
    confusions: Confusions,
    per_pair: int = NEIGHBOURS,
) -> list[BoundaryRecord]:
    """Finds pool records whose two nearest labels are confused, and about equally near.

    The distance to a label is that to its nearest labelled record, by whitened embeddings of length 1. As in
    Borderline-SMOTE (Han, Wang, Mao, ICIC 2005), a label is worth most where its border runs.

    Args:
        pool: float [P, D].
        labelled: float [N, D], by the same model.
        labels: [N].
        confusions: the pairs of labels that the model confuses.
        per_pair: number of records of each pair, those with the highest ratio; ties by row.

    Returns:
        The records of the most confused pair first, each by its ratio.
    """
    names, codes = np.unique(np.array(labels, dtype=str), return_inverse=True)
    if len(names) < 2 or not len(pool) or not confusions:
        return []
    points = whiten(np.concatenate([pool, labelled]))
    distances = _label_distances(points[: len(pool)], points[len(pool) :], codes, len(names))
    order = np.argsort(distances, axis=1, kind="stable")[:, :2]
    near, far = np.take_along_axis(distances, order, axis=1).T
    ratio = np.divide(near, far, out=np.ones_like(near), where=far > 0)
    records: list[BoundaryRecord] = []
    for pair in confusions:
        between = np.flatnonzero((np.sort(names[order], axis=1) == np.array(pair)).all(axis=1))
        for row in between[np.argsort(-ratio[between], kind="stable")[:per_pair]].tolist():
            first, second = (str(names[code]) for code in order[row])
            records.append(BoundaryRecord(row, (first, second), float(ratio[row])))
    return records


def _confusion_matrix(names: npt.NDArray[np.str_], confusions: Confusions) -> npt.NDArray[np.bool_]:
    """Returns bool [K, K], symmetric: which of the labels are confused."""
    index = {str(name): code for code, name in enumerate(names)}
    matrix = np.zeros((len(names), len(names)), bool)
    for first, second in confusions:
        if first in index and second in index:
            matrix[index[first], index[second]] = matrix[index[second], index[first]] = True
    return matrix


def _label_distances(pool: Floats, labelled: Floats, codes: npt.NDArray[np.intp], count: int) -> Floats:
    """Returns the distance of each pool record to the nearest record of each label, float32 [P, count]."""
    nearest = np.full((len(pool), count), -1, np.float32)
    for part in blocks(len(pool), _rows_per_block(len(labelled))):
        cosines = pool[part] @ labelled.T
        for code in range(count):
            nearest[part, code] = cosines[:, codes == code].max(axis=1)
    # Of points of length 1. Rounding may make a cosine greater than 1.
    return np.asarray(np.sqrt(np.maximum(2 - 2 * nearest, 0)), np.float32)


def _rows_per_block(others: int) -> int:
    """Returns how many rows are compared at a time, so that their similarities take at most 64 MiB."""
    return max(1, (16 << 20) // max(others, 1))
