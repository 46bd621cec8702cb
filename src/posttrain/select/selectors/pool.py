"""The input of a selector: the rows of a score table, some of which have a label already."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.select.scores import uncertainty
from posttrain.select.scores.registry import UNCERTAINTY_SIGN
from posttrain.select.selectors.similarity import Floats, Rows, whiten
from posttrain.store.errors import UserError

Column = npt.NDArray[Any]

Scores = Mapping[str, Column]
"""Columns of a score table: ``probabilities`` [N, K], ``embeddings`` [N, D], or ``entropy``,
``least_confidence``, ``margin`` [N] where they are already known."""

Selector = Callable[..., Rows]
"""``selector(pool, n, seed, **options)``: int64 rows for 0 < n <= free rows, best first.

It returns ``n`` of the free rows, unless an option bounds them."""

_MEASURES: dict[str, Callable[[Column], Column]] = {
    "entropy": uncertainty.entropy,
    "least_confidence": uncertainty.least_confidence,
    "margin": uncertainty.margin,
}


@dataclass(frozen=True)
class Pool:
    """Rows to choose from.

    Attributes:
        scores: columns of N entries each.
        labelled: bool [N], rows that are never chosen, and that cover their neighbourhood.
        batch: int64 [B], the labelled rows that were chosen before for the same batch: its bounds count them.
    """

    scores: Scores
    labelled: npt.NDArray[np.bool_]
    batch: Rows = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.labelled)

    @cached_property
    def free(self) -> Rows:
        """The rows without a label."""
        return np.flatnonzero(~self.labelled)

    @cached_property
    def chosen(self) -> Rows:
        """The rows with a label."""
        return np.flatnonzero(self.labelled)

    def column(self, name: str, strategy: str) -> Column:
        """Returns a column of the score table.

        Raises:
            UserError: if it is missing, naming the column and the selector that needs it.
        """
        if name not in self.scores:
            have = ", ".join(f"`{known}`" for known in self.scores) or "none"
            raise UserError(f"strategy `{strategy}` needs the score column `{name}`", fix=f"the table has {have}")
        return np.asarray(self.scores[name])

    def points(self, strategy: str, dimensions: int | None) -> Floats:
        """Returns the embeddings float32 [N, d], whitened (see `whiten`) unless ``dimensions`` is None."""
        embeddings = self.column("embeddings", strategy)
        return np.asarray(embeddings, np.float32) if dimensions is None else whiten(embeddings, dimensions)

    def uncertainty(self, by: str) -> npt.NDArray[np.float64]:
        """Returns the model's uncertainty, [N]; from ``probabilities`` if a measure is missing.

        Args:
            by: a column that measures it, such as ``entropy``, ``bald`` or ``semantic_entropy``; a column that is high
                where the model is confident, such as ``margin``, is negated.

        Raises:
            UserError: if it can be neither looked up nor computed, or ``by`` is no measure.
        """
        if by not in UNCERTAINTY_SIGN:
            raise UserError(f"no uncertainty measure `{by}`", fix="use " + ", ".join(UNCERTAINTY_SIGN))
        if by not in self.scores and by not in _MEASURES:
            fix = f"add it to select.scores, or use {', '.join(_MEASURES)}"
            raise UserError(f"no score column `{by}` to choose by", fix=fix)
        values = self.scores[by] if by in self.scores else _MEASURES[by](self.column("probabilities", by))
        return np.asarray(values, np.float64) * UNCERTAINTY_SIGN[by]

    def greatest(self, values: npt.NDArray[np.floating], n: int) -> Rows:
        """Returns the ``n`` free rows with the greatest of [N] values, greatest first; ties in row order, NaN last."""
        free_values = np.asarray(values)[self.free]
        # Stable, so that ties go by row order; and NaN must not come first, as it does in a descending sort.
        order = np.argsort(np.where(np.isnan(free_values), np.inf, -free_values), kind="stable")
        return self.free[order[:n]]


def min_max_scale(values: npt.NDArray[np.floating], among: Rows) -> npt.NDArray[np.float64]:
    """Scales values [N] to [0, 1] by the least and greatest of some rows; 1 where all are equal, 0 for NaN."""
    values = np.asarray(values, np.float64)
    known = values[among][np.isfinite(values[among])]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
    # Equal values, of one row say, are all the greatest: 0 would leave such a term without any weight.
    scaled = (values - low) / (high - low) if high > low else np.where(np.isnan(values), 0.0, 1.0)
    return np.clip(np.nan_to_num(scaled, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)


def sample_rows(rows: Rows, most: int, generator: np.random.Generator) -> Rows:
    """Draws at most ``most`` of the rows uniformly, and returns them in order."""
    return rows if len(rows) <= most else np.sort(generator.choice(rows, most, replace=False))
