"""What further labels are expected to bring, by the learning curve so far."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SCALES = np.geomspace(5, 5000, 25)
_POWERS = np.array([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
_SHARES = np.linspace(0, 1, 41)
_NOTHING = 1e-12  # of the likeliest curve's weight: all that weigh less, together, move nothing
_NODES = 7  # of the normal chance that is added to each curve's gain
_NOISE = 0.02  # an allowance for what another seed of the training would change: standard deviation


@dataclass(frozen=True)
class ExpectedGain:
    """By how much the metric rises with further labels.

    Attributes:
        gain: the mean.
        low: with ``high`` the interval that holds, at ``level``, what will be measured, chance and all.
        hope: the most that the labels themselves bring, with the certainty of ``level``'s upper end.
    """

    gain: float
    low: float
    high: float
    hope: float
    level: float


def expected_gain(
    labels: Sequence[int],
    values: Sequence[float],
    records: int,
    until: int,
    taught: int | None = None,
    level: float = 0.9,
) -> ExpectedGain | None:
    """By how much a model of ``until`` labels is expected to beat the one that learned from ``taught``.

    Accuracy after n labels is taken to follow an inverse power law, a - (a - b) (1 + n / s)^-c, from b without labels
    to a (C. Cortes et al., Learning Curves, NIPS 1993; the offset s lets it begin at no labels). All curves with
    0 <= b <= a <= 1, on a grid that is uniform in a, b and c and logarithmic in s, are weighed by how likely the
    measurements are under them: normal, with the variance of a share of ``records`` records and of one more training.
    So few measurements give a wide interval, and no curve is picked. What will be measured has the same chance in it
    again, of two trainings and of the records.

    Args:
        labels: that were learned from at each measurement.
        values: shares from 0 to 1.
        records: that each was measured on.
        until: labels that the next model will have learned from.
        taught: labels of the model that is to be beaten; those of the last measurement when None.
        level: coverage of the interval.

    Returns:
        None with fewer than two measurements, without a label, or where a value is no share.
    """
    counts, measured = np.asarray(labels, np.float64), np.asarray(values, np.float64)
    if len(counts) < 2 or counts.max() <= 0 or not ((measured >= 0) & (measured <= 1)).all():
        return None
    top, start = (values.ravel() for values in np.meshgrid(_SHARES, _SHARES, indexing="ij"))
    possible = start <= top
    top, start = top[possible], start[possible]
    ends = [counts[-1] if taught is None else taught, until]
    gains, weights = [], []
    for scale in _SCALES:
        for power in _POWERS:
            left = (1 + np.append(counts, ends) / scale) ** -power
            curve = top[:, None] - (top - start)[:, None] * left
            gains.append(curve[:, -1] - curve[:, -2])
            weights.append(_log_likelihood(curve[:, :-2], measured, records))
    gain, weight = np.concatenate(gains), np.concatenate(weights)
    weight = np.exp(weight - weight.max())
    gain, weight = gain[weight > _NOTHING], weight[weight > _NOTHING]
    nodes, shares = np.polynomial.hermite.hermgauss(_NODES)
    chance = np.sqrt(2) * nodes * np.sqrt(2 * _NOISE**2 + measured[-1] * (1 - measured[-1]) / records)
    spread, spread_weight = (gain[:, None] + chance).ravel(), (weight[:, None] * shares).ravel()
    return ExpectedGain(
        gain=float((gain * weight).sum() / weight.sum()),
        low=_quantile(spread, spread_weight, (1 - level) / 2),
        high=_quantile(spread, spread_weight, (1 + level) / 2),
        hope=_quantile(gain, weight, (1 + level) / 2),
        level=level,
    )


def _quantile(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], share: float) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(reached, share * reached[-1])]])


def _log_likelihood(
    curve: npt.NDArray[np.float64], measured: npt.NDArray[np.float64], records: int
) -> npt.NDArray[np.float64]:
    """ln of the measurements' density under each curve [C, T], float64 [C], but for a constant."""
    inside = np.clip(curve, 0.5 / records, 1 - 0.5 / records)
    variance = inside * (1 - inside) / records + _NOISE**2
    found: npt.NDArray[np.float64] = (-((measured - curve) ** 2) / (2 * variance) - 0.5 * np.log(variance)).sum(axis=1)
    return found
