"""Estimates what further labels bring from the learning curve, and decides when labelling should stop."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from posttrain.store.message import Message
from posttrain.store.section import Section

# The grid of learning curves: s, c, and a and b of `expected_gain`.
_SCALES = np.geomspace(5, 5000, 25)
_POWERS = np.array([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
_ACCURACIES = np.linspace(0, 1, 41)

_MIN_WEIGHT = 1e-12  # of the likeliest curve's weight: all that weigh less, together, move nothing

_HERMITE_NODES = 7  # for the normal chance that is added to each curve's gain

_AGREEMENT = 0.99  # Cohen's kappa of successive champions from which they answer alike, the mean over
_AGREEING_ROUNDS = 3

_SEED_NOISE = 0.02  # an allowance for what another seed of the training would change: standard deviation


class StopConfig(Section):
    """The rule that labelling more no longer pays, and its consequence."""

    action: Literal["advise", "stop"] = Field(
        default="advise", description="When more labels no longer pay: report it, or stop the loop."
    )
    gain: float = Field(
        default=0.005,
        ge=0,
        description="They do not if the next batch brings less than this at best, by all learning curves that fit.",
    )


@dataclass(frozen=True)
class ExpectedGain:
    """The expected rise of the metric with further labels.

    Attributes:
        gain: the mean.
        low, high: the interval of the gain that will be measured, chance included, at ``level``.
        hope: the upper end of the interval of the gain without that chance.
    """

    gain: float
    low: float
    high: float
    hope: float
    level: float


@dataclass(frozen=True)
class GainEstimate:
    """The estimated gain of the next batch, and whether labelling more still pays.

    Attributes:
        metric: the main suite's metric, the mean of the records' scores.
        labels: number of labels of the batch.
        expected: the expected gain; None after too few rounds.
        agreements: Cohen's kappa of successive champions on the pool, oldest first.
        why: why more labels no longer pay off; None while they may.
        unknown: why nothing is expected where that is not for want of rounds.
    """

    metric: str
    labels: int
    expected: ExpectedGain | None
    agreements: tuple[float, ...]
    why: str | None
    unknown: str = ""

    @property
    def sentence(self) -> Message:
        """The estimate in words."""
        if self.expected is None:
            why = self.unknown or Message("too few rounds")
            return Message("{why}: what {labels} labels will bring is not known", why=why, labels=self.labels)
        expected = self.expected
        values = {"labels": self.labels, "metric": self.metric, **asdict(expected)}
        template = (
            "{labels} labels are expected to bring {gain:+.3f} {metric} ({level:.0%} interval {low:+.3f} to "
            "{high:+.3f})"
        )
        return Message(template, **values)


def estimate_gain(
    config: StopConfig,
    metric: str,
    labels: int,
    expected: ExpectedGain | None,
    agreements: Sequence[float],
    unknown: str = "",
) -> GainEstimate:
    """Decides whether a further batch pays.

    Args:
        config: the config section ``select.stop``.
        metric: the unit of the gain.
        labels: number of labels of the next batch.
        expected: their gain.
        agreements: agreements of successive champions, oldest first.
        unknown: why nothing is expected, where that is not for want of rounds.
    """
    reasons = []
    if expected is not None and expected.hope < config.gain:
        reasons.append(f"{labels} labels can hardly bring {config.gain:g} {metric} (at best {expected.hope:+.4f})")
    # Successive models that agree on records without a label: M. Bloodgood and K. Vijay-Shanker, A Method for Stopping
    # Active Learning Based on Stabilizing Predictions (CoNLL 2009).
    latest = list(agreements)[-_AGREEING_ROUNDS:]
    if len(latest) == _AGREEING_ROUNDS and (mean := sum(latest) / len(latest)) >= _AGREEMENT:
        reasons.append(f"the last {_AGREEING_ROUNDS} champions answer the pool alike (kappa {mean:.3f})")
    return GainEstimate(metric, labels, expected, tuple(agreements), "; ".join(reasons) or None, unknown)


def cohen_kappa(before: Mapping[str, str], now: Mapping[str, str]) -> float | None:
    """Computes Cohen's kappa of two models' answers to the records that both answered; None for fewer than two.

    J. Cohen, A Coefficient of Agreement for Nominal Scales (1960): (p - e) / (1 - e), with p the share of records that
    are answered alike and e that share by chance. 1 where both give one and the same answer to all.
    """
    both = sorted(before.keys() & now.keys())
    if len(both) < 2:
        return None
    alike = sum(before[id] == now[id] for id in both) / len(both)
    counts_now, counts_before = (Counter(answers[id] for id in both) for answers in (now, before))
    chance = sum(count * counts_before[answer] for answer, count in counts_now.items()) / len(both) ** 2
    return 1.0 if chance == 1.0 else (alike - chance) / (1 - chance)


def expected_gain(
    labels: Sequence[int],
    values: Sequence[float],
    records: int,
    until: int,
    level: float = 0.9,
) -> ExpectedGain | None:
    """Estimates by how much a model of ``until`` labels beats that of the last measurement.

    Accuracy after n labels is taken to follow an inverse power law, a - (a - b) (1 + n / s)^-c, from b without labels
    to a (C. Cortes et al., Learning Curves, NIPS 1993; the offset s lets it begin at no labels). All curves with
    0 <= b <= a <= 1, on a grid that is uniform in a, b and c and logarithmic in s, are weighed by how likely the
    measurements are under them: normal, with the variance of a share of ``records`` records and of one more training.

    Args:
        labels: number of labels that the model of each measurement was trained on.
        values: shares from 0 to 1.
        records: number of records that each was measured on.
        until: number of labels that the next model will be trained on.
        level: coverage of the interval.

    Returns:
        None with fewer than two measurements, without a label, or where a value is not a share.
    """
    counts, measured = np.asarray(labels, np.float64), np.asarray(values, np.float64)
    if len(counts) < 2 or counts.max() <= 0 or not ((measured >= 0) & (measured <= 1)).all():
        return None
    top, bottom = (values.ravel() for values in np.meshgrid(_ACCURACIES, _ACCURACIES, indexing="ij"))
    possible = bottom <= top
    top, bottom = top[possible], bottom[possible]
    ends = [counts[-1], until]
    # All curves, weighted, instead of the best fit: few measurements must give a wide interval.
    gains, weights = [], []
    for scale in _SCALES:
        for power in _POWERS:
            decay = (1 + np.append(counts, ends) / scale) ** -power
            curve = top[:, None] - (top - bottom)[:, None] * decay
            gains.append(curve[:, -1] - curve[:, -2])
            weights.append(_log_likelihood(curve[:, :-2], measured, records))
    gain, weight = np.concatenate(gains), np.concatenate(weights)
    # Relative to the greatest: exp of the log-likelihoods themselves would underflow to 0.
    weight = np.exp(weight - weight.max())
    gain, weight = gain[weight > _MIN_WEIGHT], weight[weight > _MIN_WEIGHT]
    nodes, shares = np.polynomial.hermite.hermgauss(_HERMITE_NODES)
    # What will be measured has chance in it again: the seeds of two trainings, and the records.
    chance = np.sqrt(2) * nodes * np.sqrt(2 * _SEED_NOISE**2 + measured[-1] * (1 - measured[-1]) / records)
    spread, spread_weight = (gain[:, None] + chance).ravel(), (weight[:, None] * shares).ravel()
    low, high = _quantiles(spread, spread_weight, (1 - level) / 2, (1 + level) / 2)
    (hope,) = _quantiles(gain, weight, (1 + level) / 2)
    mean = float((gain * weight).sum() / weight.sum())
    return ExpectedGain(gain=mean, low=low, high=high, hope=hope, level=level)


def _quantiles(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], *shares: float) -> list[float]:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return [float(values[order[np.searchsorted(reached, share * reached[-1])]]) for share in shares]


def _log_likelihood(
    curve: npt.NDArray[np.float64], measured: npt.NDArray[np.float64], records: int
) -> npt.NDArray[np.float64]:
    """Computes ln of the measurements' density under each curve [C, T], float64 [C], but for a constant."""
    # Clipped: a curve that reaches 1 would have variance 0 and rule out a single wrong answer.
    inside = np.clip(curve, 0.5 / records, 1 - 0.5 / records)
    variance = inside * (1 - inside) / records + _SEED_NOISE**2
    log_likelihoods: npt.NDArray[np.float64] = (
        -((measured - curve) ** 2) / (2 * variance) - 0.5 * np.log(variance)
    ).sum(axis=1)
    return log_likelihoods
