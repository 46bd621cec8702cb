"""Rejects records whose measures break bounds; shared by all filters with fixed thresholds."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.records.outcome import Outcome, Rejection, reject_rows

Measures = Mapping[str, npt.NDArray[np.float64]]
"""By name one number per record; NaN where there is nothing to measure."""

_COMPARISONS = {
    "at least": np.greater_equal,
    "at most": np.less_equal,
    "more than": np.greater,
    "less than": np.less,
}


class Bound(NamedTuple):
    """A bound on a measure: ``at least``, ``at most``, ``more than`` or ``less than`` the limit.

    Attributes:
        reason: The reason of the rejection.
        measure: The name of the measure.
        limit: None sets no bound.
    """

    reason: str
    measure: str
    must_be: Literal["at least", "at most", "more than", "less than"]
    limit: float | None


def apply_bounds(table: pa.Table, step: str, measures: Measures, bounds: Sequence[Bound]) -> Outcome:
    """Rejects every record of a RECORD table of N rows by the first of the bounds that it breaks.

    Args:
        measures: float64 [N] each, which also become the facts of the outcome, NaN as null; NaN breaks no bound.
    """
    rejections: dict[int, Rejection] = {}
    for bound in bounds:
        if bound.limit is None:
            continue
        values = measures[bound.measure]
        # Not the comparison's opposite: NaN fails both, and a record without the measure must pass.
        broken = ~(_COMPARISONS[bound.must_be](values, bound.limit) | np.isnan(values))
        for row in np.flatnonzero(broken).tolist():
            value = float(values[row])
            detail = f"{bound.measure.replace('_', ' ')} {value:.6g}, must be {bound.must_be} {bound.limit:.6g}"
            # The first bound that a record breaks is its reason: they are ordered from the plainest on.
            rejections.setdefault(row, Rejection(bound.reason, detail, score=value))
    facts = {name: pa.array(values, pa.float64(), from_pandas=True) for name, values in measures.items()}
    return reject_rows(table, step, rejections, facts)


def ratio(piece: npt.NDArray[np.float64], whole: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Divides two arrays, float64 [N]; NaN where the whole is zero."""
    quotients = np.full(len(whole), np.nan)
    # `where` leaves NaN and raises no warning where the whole is zero.
    np.divide(piece, whole, out=quotients, where=whole > 0)
    return quotients
