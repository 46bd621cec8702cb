"""Records that say the same."""

from typing import ClassVar

import numpy as np
import pyarrow as pa

from posttrain.data.steps.step import Corpus, Decision, GlobalStep, Rejection, places


class Exact(GlobalStep):
    """Of records with equal normalised content the first stays."""

    name: ClassVar[str] = "exact"
    evaluation: ClassVar[bool] = True

    def decide(self, corpus: Corpus) -> Decision:
        ids = np.asarray(corpus.sketches()["id"].to_numpy(), dtype="S20")
        rows = np.flatnonzero(corpus.alive)
        _, first, inverse = np.unique(ids[rows], return_index=True, return_inverse=True)
        kept = rows[first][inverse]  # np.unique names the first of equal ones
        gone = rows[kept != rows]
        stays = kept[kept != rows]
        where = _places(corpus, np.unique(stays))
        rejections = {}
        for row, other in zip(gone.tolist(), stays.tolist(), strict=True):
            identity = ids[other].decode()
            detail = f"the same as {where[other]}"
            rejections[row] = Rejection("exact duplicate", detail, cluster=identity, kept=identity)
        return Decision(rejections)


def _places(corpus: Corpus, rows: np.ndarray) -> dict[int, str]:
    """``file:line`` of some rows."""
    return dict(zip(rows.tolist(), places(corpus.columns(["source", "line"]).take(pa.array(rows))), strict=True))
