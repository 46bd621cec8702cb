"""Records that give away the test set."""

import numpy as np
import pyarrow as pa

from posttrain.data.flow import Work
from posttrain.data.normalise import input_texts
from posttrain.data.similarity import candidates, jaccard, shingle_rows
from posttrain.data.steps.step import Outcome, Rejection, part, places

_NGRAM = 5


def leaks(test: pa.Table, threshold: float | None = 0.9) -> Work:
    """A step that takes out records with a test record's group, with its input, or with one like it.

    Args:
        threshold: Jaccard similarity of 5-character runs from which inputs are alike; None: only equal ones.
    """
    where = places(test)
    groups: dict[str, int] = {}
    inputs: dict[str, int] = {}
    for row, (group, identity) in enumerate(zip(test["group"].to_pylist(), test["input_id"].to_pylist(), strict=True)):
        inputs.setdefault(identity, row)
        if group is not None:
            groups.setdefault(group, row)

    def step(table: pa.Table) -> Outcome:
        alike = {} if threshold is None else _most_alike(input_texts(table), input_texts(test), threshold)
        rejections: dict[int, Rejection] = {}
        pairs = zip(table["input_id"].to_pylist(), table["group"].to_pylist(), strict=True)
        for row, (identity, group) in enumerate(pairs):
            if identity in inputs:
                rejections[row] = Rejection("equals a test input", f"the same input as {where[inputs[identity]]}")
            elif group in groups:
                detail = f"group `{group}` is also that of {where[groups[group]]}"
                rejections[row] = Rejection("group of a test record", detail)
            elif row in alike:
                other, similarity = alike[row]
                rejections[row] = Rejection("like a test input", f"similarity {similarity:.2f} to {where[other]}")
        return part(table, "leak", rejections)

    return step


def _most_alike(texts: list[str], others: list[str], threshold: float) -> dict[int, tuple[int, float]]:
    """By the row of a text that is like one of ``others``: the row of the most similar and the similarity.

    Of equally similar ones the first counts.
    """
    rows = shingle_rows([*texts, *others], _NGRAM)
    left, right = rows[: len(texts)], rows[len(texts) :]
    best: dict[int, tuple[int, float]] = {}
    for i, j in candidates(left, right, threshold):
        similarity = jaccard(left, right, i, j)
        for pair in np.flatnonzero(similarity >= threshold):
            row, other, value = int(i[pair]), int(j[pair]), float(similarity[pair])
            known = best.get(row)
            if known is None or (-value, other) < (-known[1], known[0]):
                best[row] = (other, value)
    return best
