"""Estimates what further labels bring from the learning curve, and decides when labelling should stop."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from posttrain.store.section import Section

_SCALES = np.geomspace(5, 5000, 25)

_POWERS = np.array([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])

_ACCURACIES = np.linspace(0, 1, 41)

_MIN_WEIGHT = 1e-12  # of the likeliest curve's weight: all that weigh less, together, move nothing

_HERMITE_NODES = 7  # of the normal chance that is added to each curve's gain

_SEED_NOISE = 0.02  # an allowance for what another seed of the training would change: standard deviation


class StopConfig(Section):
    """When labelling more has stopped to pay, and what follows."""

    action: Literal["advise", "stop"] = Field(
        default="advise", description="Say so in the log and the report, or turn no further round."
    )
    gain: float = Field(
        default=0.005,
        ge=0,
        description="It has where the next batch can bring so little at best, by all learning curves that fit.",
    )
    agreement: float = Field(
        default=0.99,
        gt=0,
        le=1,
        description="It has where successive champions agree so well on the pool (Cohen's kappa), on the mean of ...",
    )
    rounds: int = Field(default=3, ge=1, description="... so many rounds.")


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


@dataclass(frozen=True)
class GainEstimate:
    """What is to be expected of the next batch.

    Attributes:
        metric: the main suite's, as the mean of the records' scores.
        labels: in the batch.
        expected: None while too little is known.
        agreements: Cohen's kappa of successive champions on the pool, oldest first.
        why: why labelling more has stopped to pay; None where it may still.
        unknown: why nothing is expected where that is not for want of rounds.
    """

    metric: str
    labels: int
    expected: ExpectedGain | None
    agreements: tuple[float, ...]
    why: str | None
    unknown: str = ""

    @property
    def sentence(self) -> str:
        """The estimate in words."""
        if self.expected is None:
            return f"{self.unknown or 'too few rounds'}: what {self.labels} labels will bring is not known"
        one = self.expected
        return (
            f"{self.labels} labels are expected to bring {one.gain:+.3f} {self.metric} "
            f"({one.level:.0%} interval {one.low:+.3f} to {one.high:+.3f})"
        )


def estimate_gain(
    config: StopConfig,
    metric: str,
    labels: int,
    expected: ExpectedGain | None,
    agreements: Sequence[float],
    unknown: str = "",
) -> GainEstimate:
    """Judge whether a further batch pays.

    The agreement of successive models on records that nobody has labelled is the rule of M. Bloodgood and
    K. Vijay-Shanker, A Method for Stopping Active Learning Based on Stabilizing Predictions (CoNLL 2009).

    Args:
        config: the config section ``select.stop``.
        metric: what the gain is in.
        labels: of the next batch.
        expected: what they bring.
        agreements: of successive champions, oldest first.
        unknown: why nothing is expected, where that is not for want of rounds.
    """
    reasons = []
    if expected is not None and expected.hope < config.gain:
        reasons.append(f"{labels} labels can hardly bring {config.gain:g} {metric} (at best {expected.hope:+.4f})")
    latest = list(agreements)[-config.rounds :]
    if len(latest) == config.rounds and (mean := sum(latest) / len(latest)) >= config.agreement:
        reasons.append(f"the last {config.rounds} champions answer the pool alike (kappa {mean:.3f})")
    return GainEstimate(metric, labels, expected, tuple(agreements), "; ".join(reasons) or None, unknown)


def cohen_kappa(before: Mapping[str, str], now: Mapping[str, str]) -> float | None:
    """Cohen's kappa of two models' answers, by record, on the records that both have answered; None for fewer than two.

    J. Cohen, A Coefficient of Agreement for Nominal Scales (1960): (p - e) / (1 - e), with p the share of records that
    are answered alike and e what it would be by chance. 1 where both give one and the same answer to all.
    """
    both = sorted(before.keys() & now.keys())
    if len(both) < 2:
        return None
    alike = sum(before[id] == now[id] for id in both) / len(both)
    ours, theirs = (Counter(side[id] for id in both) for side in (now, before))
    chance = sum(count * theirs[answer] for answer, count in ours.items()) / len(both) ** 2
    return 1.0 if chance == 1.0 else (alike - chance) / (1 - chance)


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
    top, start = (values.ravel() for values in np.meshgrid(_ACCURACIES, _ACCURACIES, indexing="ij"))
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
    gain, weight = gain[weight > _MIN_WEIGHT], weight[weight > _MIN_WEIGHT]
    nodes, shares = np.polynomial.hermite.hermgauss(_HERMITE_NODES)
    chance = np.sqrt(2) * nodes * np.sqrt(2 * _SEED_NOISE**2 + measured[-1] * (1 - measured[-1]) / records)
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
    variance = inside * (1 - inside) / records + _SEED_NOISE**2
    log_likelihoods: npt.NDArray[np.float64] = (
        -((measured - curve) ** 2) / (2 * variance) - 0.5 * np.log(variance)
    ).sum(axis=1)
    return log_likelihoods
