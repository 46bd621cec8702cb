"""What a sample with known inclusion probabilities says of the whole pool."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NORMAL = 1.959964  # 95% of a normal distribution lie within so many standard deviations


@dataclass(frozen=True)
class Share:
    """A share of the pool, estimated from ``drawn`` records, with the interval that holds it at 95%."""

    value: float
    low: float
    high: float
    drawn: int


def share_of_pool(true: npt.NDArray[np.bool_], inclusion: npt.NDArray[np.floating]) -> Share | None:
    """The share of the pool's records of which something is true.

    Each drawn record stands for 1 / inclusion of them (J. Hajek, Comment on an essay by D. Basu, 1971): the estimate
    is the weighted mean. The interval is E. B. Wilson's (JASA 22, 1927), with L. Kish's effective number of records,
    (sum w)^2 / sum w^2, which is their number where all were as likely to be drawn.

    Args:
        true: bool [M], of the records that were drawn.
        inclusion: float [M], with which probability each was.

    Returns:
        None where nothing was drawn.

    Raises:
        ValueError: a probability is not above 0 and at most 1.
    """
    if not len(true):
        return None
    probabilities = np.asarray(inclusion, np.float64)
    if not ((probabilities > 0) & (probabilities <= 1)).all():
        raise ValueError("a drawn record's inclusion probability is above 0 and at most 1")
    weights = 1 / probabilities
    value = float((weights * true).sum() / weights.sum())
    count = float(weights.sum() ** 2 / (weights**2).sum())
    spread = _NORMAL**2 / count
    centre = (value + spread / 2) / (1 + spread)
    half = _NORMAL / (1 + spread) * np.sqrt(value * (1 - value) / count + spread / (4 * count))
    return Share(value, max(0.0, float(centre - half)), min(1.0, float(centre + half)), len(true))
