"""The input of a selector: the rows of a score table, some of which have a label already."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.select.scores import uncertainty
from posttrain.select.scores.registry import BASE_MEASURES, uncertainty_sign
from posttrain.select.selectors.similarity import DIMENSIONS, Floats, Rows, whiten
from posttrain.store.errors import UserError

Column = npt.NDArray[Any]

Scores = Mapping[str, Column]
"""Columns of a score table: ``probabilities`` [N, K], ``embeddings`` [N, D], or ``entropy``,
``least_confidence``, ``margin`` [N] if they are computed already."""

Selector = Callable[..., Rows]
"""``selector(pool, n, seed, **options)``: int64 rows for 0 < n <= unlabelled rows, best first.

It returns ``n`` of the unlabelled rows."""

_MEASURES: dict[str, Callable[[Column], Column]] = {
    "entropy": uncertainty.entropy,
    "least_confidence": uncertainty.least_confidence,
    "margin": uncertainty.margin,
}


@dataclass(frozen=True)
class Pool:
    """Rows to choose from.

    Attributes:
        strategy: name of the selector, for error messages.
        scores: columns of N entries each.
        labelled: bool [N], rows that are never chosen, and that cover their neighbourhood.
    """

    strategy: str
    scores: Scores
    labelled: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.labelled)

    @cached_property
    def unlabelled_rows(self) -> Rows:
        """The rows without a label, the only ones to choose."""
        return np.flatnonzero(~self.labelled)

    @cached_property
    def labelled_rows(self) -> Rows:
        """The rows with a label."""
        return np.flatnonzero(self.labelled)

    def column(self, name: str) -> Column:
        """Returns a column of the score table.

        Raises:
            UserError: if it is missing, naming the column and the selector that needs it.
        """
        if name not in self.scores:
            columns = ", ".join(f"`{column}`" for column in self.scores) or "none"
            raise UserError(
                f"strategy `{self.strategy}` needs the score column `{name}`", fix=f"the table has {columns}"
            )
        return np.asarray(self.scores[name])

    def whitened_embeddings(self, dimensions: int | None = DIMENSIONS) -> Floats:
        """Returns the embeddings float32 [N, d], whitened (see `whiten`) unless ``dimensions`` is None."""
        self.check_counts(dimensions=dimensions)
        embeddings = self.column("embeddings")
        return np.asarray(embeddings, np.float32) if dimensions is None else whiten(embeddings, dimensions)

    def uncertainty(self, by: str) -> npt.NDArray[np.float64]:
        """Returns the model's uncertainty, [N]; from ``probabilities`` if a measure is missing.

        Args:
            by: a column that measures it, such as ``entropy`` or ``perplexity``; a column that is high
                where the model is confident, such as ``margin``, is negated.

        Raises:
            UserError: if it can be neither looked up nor computed, or ``by`` is not a measure.
        """
        sign = uncertainty_sign(by)
        if sign is None:
            raise UserError(
                f"no uncertainty measure `{by}`", fix=f"use {', '.join(BASE_MEASURES)} or a score of select.scores"
            )
        if by not in self.scores and by not in _MEASURES:
            fix = f"add it to select.scores, or use {', '.join(_MEASURES)}"
            raise UserError(f"no score column `{by}` to choose by", fix=fix)
        values = self.scores[by] if by in self.scores else _MEASURES[by](self.column("probabilities"))
        return np.asarray(values, np.float64) * sign

    def top(self, values: npt.NDArray[np.floating], n: int) -> Rows:
        """Returns the ``n`` unlabelled rows with the greatest of [N] values, greatest first; ties by row, NaN last."""
        candidates = np.asarray(values)[self.unlabelled_rows]
        # Stable, so that ties go by row order; and NaN must not come first, as it does in a descending sort.
        order = np.argsort(np.where(np.isnan(candidates), np.inf, -candidates), kind="stable")
        return self.unlabelled_rows[order[:n]]

    def check_counts(self, **options: int | None) -> None:
        """Raises a UserError for an option that is neither None nor a whole number of 1 or more."""
        for name, value in options.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise self._option_error(name, value, "a whole number, 1 or more")

    def check_numbers(self, **options: float | None) -> None:
        """Raises a UserError for an option that is neither None nor a finite number of 0 or more."""
        for name, value in options.items():
            # True is a number in Python, and NaN fails both comparisons.
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < np.inf
            ):
                raise self._option_error(name, value, "a number, 0 or more")

    def _option_error(self, name: str, value: object, expected: str) -> UserError:
        return UserError(f"strategy `{self.strategy}`: `{name}` is {value!r}, and must be {expected}")


def min_max_scale(values: npt.NDArray[np.floating], among: Rows) -> npt.NDArray[np.float64]:
    """Scales values [N] to [0, 1] by the least and greatest of some rows; 1 where all are equal, 0 for NaN."""
    values = np.asarray(values, np.float64)
    finite = values[among][np.isfinite(values[among])]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    # Equal values, of one row say, are all the greatest: 0 would leave such a term without any weight.
    scaled = (values - low) / (high - low) if high > low else np.where(np.isnan(values), 0.0, 1.0)
    return np.clip(np.nan_to_num(scaled, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)


def sample_rows(rows: Rows, most: int, generator: np.random.Generator) -> Rows:
    """Draws at most ``most`` of the rows uniformly, and returns them in order."""
    return rows if len(rows) <= most else np.sort(generator.choice(rows, most, replace=False))
