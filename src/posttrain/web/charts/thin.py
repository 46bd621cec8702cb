"""Long series for small charts: thinned so that no spike is lost, and smoothed."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def thin(steps: Numbers, values: Numbers, buckets: int) -> tuple[Numbers, Numbers]:
    """At most two points of each of so many stretches: its lowest and its highest, in their order.

    Args:
        steps, values: float64 [N]; NaN where nothing was measured.
        buckets: stretches of steps, of the same length but for one.

    Returns:
        Both, [M] with M at most ``2 * buckets``; a stretch of nothing but NaN stays one NaN, so that a line breaks.
    """
    if len(values) <= 2 * buckets:
        return steps, values
    kept: list[int] = []
    for stretch in np.array_split(np.arange(len(values)), buckets):
        part = values[stretch]
        if np.isnan(part).all():
            kept.append(int(stretch[0]))
        else:
            kept += sorted({int(stretch[np.nanargmin(part)]), int(stretch[np.nanargmax(part)])})
    return steps[kept], values[kept]


def smooth(values: Numbers, window: int) -> Numbers:
    """The mean over ``window`` values around each, fewer at both ends; NaN counts for nothing and stays NaN."""
    known = ~np.isnan(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values))
    first, last = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    # As many on either side, so that a slope is not bent at the ends.
    reach = np.minimum(at - first, last - 1 - at)
    first, last = at - reach, at + reach + 1
    with np.errstate(invalid="ignore"):
        means = (total[last] - total[first]) / (count[last] - count[first])
    return np.where(known, means, np.nan)


def window_of(count: int) -> int:
    """How many of ``count`` values are smoothed together; 1 where they are too few."""
    return 1 if count < 30 else max(5, count // 30) | 1
