"""Inputs that say nearly the same."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.flow import Work
from posttrain.data.normalise import input_texts
from posttrain.data.similarity import candidates, comparable, jaccard, shingle_rows
from posttrain.data.steps.step import Outcome, Rejection, part, places


def near_duplicates(
    texts: Sequence[str], threshold: float = 0.8, ngram: int = 5, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Cluster of every text, int64 [N], named by the smallest index in it.

    Texts are case-folded, their whitespace is folded, and each becomes its set of ``ngram``-character runs:
    characters rather than words, because a message of ten words has too few word runs to survive one typo.
    Pairs whose Jaccard similarity is at least ``threshold`` are joined; a cluster is what hangs together.
    The search is exact and the result does not depend on the order of pairs.

    Args:
        seed: changes nothing; taken so that a search by random sketches can stand in this one's place.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], not {threshold}")
    first: dict[str, int] = {}
    owner = np.array([first.setdefault(comparable(text), row) for row, text in enumerate(texts)], dtype=np.int64)
    distinct = np.array(list(first.values()), dtype=np.int64)
    parent = np.arange(len(distinct))
    rows = shingle_rows([texts[row] for row in distinct], ngram)
    for i, j in candidates(rows, rows, threshold):
        apart = (i < j) & (parent[i] != parent[j])
        i, j = i[apart], j[apart]
        similar = jaccard(rows, rows, i, j) >= threshold
        for a, b in zip(i[similar].tolist(), j[similar].tolist(), strict=True):
            _join(parent, a, b)
        parent = _flat(parent)
    position = {row: number for number, row in enumerate(distinct.tolist())}
    return distinct[parent[[position[row] for row in owner.tolist()]]] if len(texts) else owner


def near_duplicate_records(threshold: float, ngram: int = 5) -> Work:
    """A step: in a cluster of like inputs the first record of each answer stays.

    Like inputs with different answers are no duplicates; they are where one class ends and the next begins.
    """

    def step(table: pa.Table) -> Outcome:
        where = places(table)
        clusters = near_duplicates(input_texts(table), threshold, ngram).tolist()
        answers = zip(table["completion"].to_pylist(), table["rejected"].to_pylist(), strict=True)
        first: dict[tuple[int, str | None, str | None], int] = {}
        rejections: dict[int, Rejection] = {}
        for row, (cluster, (answer, worse)) in enumerate(zip(clusters, answers, strict=True)):
            kept = first.setdefault((cluster, answer, worse), row)
            if kept != row:
                rejections[row] = Rejection("near duplicate", f"in one cluster with {where[kept]}")
        return part(table, "near duplicates", rejections)

    return step


def _join(parent: npt.NDArray[np.int64], a: int, b: int) -> None:
    a, b = _root(parent, a), _root(parent, b)
    parent[max(a, b)] = min(a, b)


def _root(parent: npt.NDArray[np.int64], member: int) -> int:
    while parent[member] != member:
        parent[member] = parent[parent[member]]
        member = int(parent[member])
    return member


def _flat(parent: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``parent`` with every member pointing at its root."""
    while not np.array_equal(parent, parent[parent]):
        parent = parent[parent]
    return parent
