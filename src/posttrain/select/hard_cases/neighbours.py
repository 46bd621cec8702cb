"""Pool records near hard cases, and why they were chosen."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from posttrain.select.hard_cases.kinds import HardCase
from posttrain.select.selectors.whitening import DIMENSIONS, whiten

NEIGHBOURS = 10  # pool records that one hard case points at

_SAYING = {
    "wrong": "answered wrongly",
    "high_loss": "of high loss",
    "regressions": "which the champion before answered rightly",
    "disagreement": "which two models answer differently",
}


def nearest_case(
    embeddings: np.ndarray,
    hard_cases: np.ndarray,
    neighbours: int = NEIGHBOURS,
    dimensions: int = DIMENSIONS,
) -> npt.NDArray[np.int64]:
    """The hard case that each record is a near neighbour of.

    Both sets are whitened together (see ``whiten``) and compared by cosine.

    Args:
        embeddings: float [N, D] of the pool.
        hard_cases: float [H, D] by the same model.
        neighbours: pool records taken for each hard case; ties by row.
        dimensions: principal components that are kept.

    Returns:
        int64 [N]: of the hard cases among whose nearest neighbours the record is, the row of the closest; ties by
        row; -1 where it is near none.
    """
    nearest = np.full(len(embeddings), -1, np.int64)
    if len(embeddings) == 0 or len(hard_cases) == 0:
        return nearest
    points = whiten(np.concatenate([embeddings, hard_cases]), dimensions)
    closeness = np.full(len(embeddings), -np.inf)
    for case, point in enumerate(points[len(embeddings) :]):
        similarity = points[: len(embeddings)] @ point
        near = np.argsort(-similarity, kind="stable")[:neighbours]
        closer = near[similarity[near] > closeness[near]]
        nearest[closer], closeness[closer] = case, similarity[closer]
    return nearest


def why(nearest: npt.NDArray[np.int64], cases: Sequence[HardCase]) -> list[str | None]:
    """Which hard case a pool record was chosen for, in words.

    Args:
        nearest: int64 [N], from `nearest_case`.
        cases: H hard cases, in the order of their embeddings.

    Returns:
        N sentences, such as ``near test record 3fa2, answered wrongly (`cash` for `card`)``; None for what is near
        none.
    """
    said = [_said(case) for case in cases]
    return [None if case < 0 else said[case] for case in nearest.tolist()]


def _said(case: HardCase) -> str:
    told = f"near test record {case.id}, {' and '.join(_SAYING[kind] for kind in case.kinds)}"
    if "wrong" in case.kinds and case.expected and case.predicted is not None:
        told += f" (`{case.predicted[:40]}` for `{case.expected[:40]}`)"
    return told
