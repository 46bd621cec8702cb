"""Compares two shares of good outcomes while they arrive: a sequential test that is valid however often one looks.

Outcomes of a treatment (a canary) and of a control (the champion) are cut into blocks, each of a stretch of time in
which both arms report. A block's factor is the likelihood of its outcomes under an alternative that earlier blocks
predict, divided by their likelihood under the member of the null hypothesis that is nearest to it in Kullback-Leibler
divergence. For a convex null hypothesis this factor is an e-variable: its mean is at most 1 under every member. Source:
R. J. Turner and P. D. Grünwald, Exact anytime-valid confidence intervals for contingency tables and beyond, Statistics
and Probability Letters 198 (2023), theorem 1 and equation 3; for equal shares R. J. Turner, A. Ly and P. D. Grünwald,
Generic E-variables for exact sequential k-sample tests that allow for optional stopping (2024), equation 2.

A product of such factors exceeds 1 / alpha at any time at all with a probability of at most alpha (J. Ville, 1939). So
the error is bounded exactly, for any number of outcomes, and one may look after each of them and stop at once.

The shares may change over time, in both arms alike, and an arm may report more often than the other or than expected. A
factor is a product of terms that are linear in the probability of each outcome, so that by Jensen's inequality its mean
is at most that of outcomes which are all good with the block's mean probability: the bound holds where the means over
each block are those of the null hypothesis. Outcomes are assumed to be independent, and when an arm reports not to
depend on how good its outcomes are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

BLOCK_OUTCOMES = 5
"""Outcomes of each arm that a block has at least: more would delay a decision."""

_EFFECTS = (1.0, 2.0, 4.0)
"""Effects that the alternatives have, in margins: the least one worth noticing, and larger ones, seen sooner."""

_PRIOR = 1.0  # good and bad outcomes that each alternative begins with

_BISECTIONS = 30

_ROUNDING = 1e-9

_GRID_STEPS = 20  # of the interval's first search, over all differences from -1 to 1

Decision = Literal["worse", "not_worse"]


@dataclass(frozen=True)
class Blocks:
    """Outcomes in blocks.

    Attributes:
        control: float64 [B, 2], bad and good outcomes of the control.
        treatment: float64 [B, 2], the same of the treatment.
        ends: int64 [B], number of outcomes that have arrived once each block is known.
    """

    control: np.ndarray
    treatment: np.ndarray
    ends: np.ndarray

    def reversed(self) -> "Blocks":
        """Returns the blocks with good and bad exchanged, which negates the difference of the shares."""
        return Blocks(self.control[:, ::-1], self.treatment[:, ::-1], self.ends)


@dataclass(frozen=True)
class SequentialResult:
    """The state of a test after some outcomes.

    Attributes:
        decision: ``worse``: the treatment's share is less than the control's; ``not_worse``: it is not less by the
            margin or more; None: undecided.
        outcomes: Number of outcomes until the decision, or all of them.
        worse: The e-value against "the treatment is not worse"; it decides once it reaches `needed`.
        not_worse: The same against "the treatment is worse by the margin or more".
        needed: 1 / alpha.
        low: Lower end of the confidence sequence of treatment minus control, which covers it at all times at once with
            a probability of 1 - 2 alpha.
        high: Its upper end.
        waiting: Outcomes of the control and of the treatment behind the last block, which wait for the other arm's.
    """

    decision: Decision | None
    outcomes: int
    worse: float
    not_worse: float
    needed: float
    low: float
    high: float
    waiting: tuple[int, int]


def run_test(
    treatment: np.ndarray,
    good: np.ndarray,
    *,
    share: float,
    alpha: float,
    margin: float,
    minimum: int = 0,
    interval: bool = True,
) -> SequentialResult:
    """Tests outcomes in the order of their arrival, and stops at the first one that decides.

    The probability of ``worse`` is at most ``alpha`` if the treatment is not worse, and that of ``not_worse`` at most
    ``alpha`` if it is worse by the margin or more. Never both can be wrong, so that ``alpha`` is not halved.

    Args:
        treatment: bool [N], True for outcomes of the treatment.
        good: bool [N].
        share: Share of outcomes that the treatment is expected to have; a wrong one costs outcomes, not validity.
        alpha: Greatest probability of a wrong decision.
        margin: Least loss worth noticing, as a difference of shares.
        minimum: Outcomes of each arm before which nothing is decided.
        interval: False to leave the interval at -1 to 1, which takes most of the time.

    Raises:
        ValueError: the lengths differ, or share, alpha or margin is not between 0 and 1.
    """
    if treatment.shape != good.shape or treatment.ndim != 1:
        raise ValueError(f"outcomes must be two arrays [N], got shapes {treatment.shape} and {good.shape}")
    if not all(0 < value < 1 for value in (share, alpha, margin)):
        raise ValueError(f"share, alpha and margin must be between 0 and 1, got {share}, {alpha} and {margin}")
    needed = math.log(1 / alpha)
    blocks = make_blocks(treatment, good, share)
    worse = log_e_values(blocks, 0.0, margin)
    not_worse = log_e_values(blocks.reversed(), margin, margin)
    in_blocks = [np.cumsum(arm.sum(axis=1)) for arm in (blocks.control, blocks.treatment)]
    counted = np.minimum(*in_blocks) >= minimum
    decided = np.flatnonzero(counted & (np.maximum(worse, not_worse) >= needed))
    decision: Decision | None = None
    last = len(blocks.ends)
    waiting = (
        int((~treatment).sum() - blocks.control.sum()),
        int(treatment.sum() - blocks.treatment.sum()),
    )
    if len(decided):
        last = int(decided[0]) + 1
        decision = "worse" if worse[last - 1] >= needed else "not_worse"
    blocks = Blocks(blocks.control[:last], blocks.treatment[:last], blocks.ends[:last])
    low, high = (-1.0, 1.0)
    if interval and last:
        high = _upper_end(blocks, margin, needed)
        low = -_upper_end(blocks.reversed(), margin, needed)
    return SequentialResult(
        decision=decision,
        outcomes=int(blocks.ends[-1]) if decision else len(good),
        worse=_last(worse[:last]),
        not_worse=_last(not_worse[:last]),
        needed=1 / alpha,
        low=low,
        high=high,
        waiting=waiting,
    )


def make_blocks(treatment: np.ndarray, good: np.ndarray, share: float) -> Blocks:
    """Cuts the outcomes into blocks with `BLOCK_OUTCOMES` of each arm or more, of the same stretch of time.

    Where a block ends depends on the arms alone, never on how good their outcomes are.

    Args:
        treatment: bool [N], True for outcomes of the treatment, in the order of their arrival.
        good: bool [N].
        share: Share of outcomes that the treatment is expected to have, between 0 and 1.
    """
    # Never the n-th outcomes of both arms over all time: one that reports half as often would be compared with a later
    # time. Within a stretch they are, so that a batch of one arm and the other's behind it are many blocks and not one.
    arms = [np.flatnonzero(~treatment), np.flatnonzero(treatment)]
    cuts, ends = [[[0], [0]], []]
    for stop, known in _stretches(treatment, arms, share):
        begins = [cut[-1] for cut in cuts]
        counts = [int(np.searchsorted(arm, stop)) - begin for arm, begin in zip(arms, begins, strict=True)]
        blocks = min(counts) // BLOCK_OUTCOMES
        for cut, begin, count in zip(cuts, begins, counts, strict=True):
            cut += [begin + count * block // blocks for block in range(1, blocks + 1)]
        ends += [known] * blocks
    outcomes = []
    for arm, cut in zip(arms, cuts, strict=True):
        number_good = np.diff(np.concatenate([[0], np.cumsum(good[arm])])[cut])
        outcomes.append(np.stack([np.diff(cut) - number_good, number_good], axis=1).astype(np.float64))
    return Blocks(outcomes[0], outcomes[1], np.array(ends, np.int64))


def _stretches(treatment: np.ndarray, arms: Sequence[np.ndarray], share: float) -> Iterator[tuple[int, int]]:
    """Yields the end of each stretch, and the number of outcomes that have arrived once it is known.

    A stretch ends once both arms have `BLOCK_OUTCOMES`, and the one that lags has caught up with its share or is
    interrupted by the other.
    """
    begins = [0, 0]
    while all(at + BLOCK_OUTCOMES <= len(arm) for at, arm in zip(begins, arms, strict=True)):
        stop = 1 + max(int(arm[at + BLOCK_OUTCOMES - 1]) for at, arm in zip(begins, arms, strict=True))
        control, treated = (int(np.searchsorted(arm, stop)) - at for at, arm in zip(begins, arms, strict=True))
        lag = control * share - treated * (1 - share)
        lagging = lag > 0  # whether the treatment lags
        sign = 1 if lagging else -1
        while sign * lag > _ROUNDING:
            if stop == len(treatment):
                return
            if treatment[stop] != lagging:
                break
            lag -= (1 - share) if lagging else -share
            stop += 1
        yield stop, stop + (sign * lag > _ROUNDING)
        begins = [int(np.searchsorted(arm, stop)) for arm in arms]


def log_e_values(blocks: Blocks, shift: float, margin: float) -> np.ndarray:
    """Computes the logarithm of the e-process against "treatment minus control is ``shift`` or more".

    It is the mean of several, whose alternatives lie below ``shift`` by `_EFFECTS` margins.

    Returns:
        float64 [B], after each block.
    """
    processes = [np.cumsum(_log_factors(blocks, shift, shift - effect * margin)) for effect in _EFFECTS]
    return np.asarray(np.logaddexp.reduce(processes, axis=0) - math.log(len(_EFFECTS)))


def _log_factors(blocks: Blocks, shift: float, difference: float) -> np.ndarray:
    """Computes the logarithm of each block's factor.

    The alternative has ``difference`` and the control's share that earlier blocks predict; the null hypothesis is that
    the difference is ``shift`` or more.
    """
    bad_c, good_c = blocks.control.T
    bad_t, good_t = blocks.treatment.T
    n_c, n_t = bad_c + good_c, bad_t + good_t
    before_c, before_t = np.cumsum(n_c) - n_c, np.cumsum(n_t) - n_t
    good_before = np.cumsum(good_c + good_t) - good_c - good_t
    total = before_c + before_t + 2 * _PRIOR
    # All outcomes of earlier blocks predict the control's share: those of the treatment lie `difference` away.
    share = (good_before - before_t * difference + _PRIOR) / total
    # Away from 0 and 1, where one surprising outcome would end the process for good.
    least = 0.5 / total
    low, high = np.maximum(least, least - difference), np.minimum(1 - least, 1 - least - difference)
    # No two shares differ by that much: such an alternative bets nothing.
    possible = low < high
    alternative_c = np.where(possible, np.clip(share, low, np.maximum(low, high)), 0.5)
    alternative_t = np.where(possible, alternative_c + difference, 0.5)
    null_c = nearest_null(alternative_c, alternative_t, n_c, n_t, shift)
    null_t = null_c + shift
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = (
            good_c * np.log(alternative_c / null_c)
            + bad_c * np.log((1 - alternative_c) / (1 - null_c))
            + good_t * np.log(alternative_t / null_t)
            + bad_t * np.log((1 - alternative_t) / (1 - null_t))
        )
    return np.asarray(np.where(possible, logs, 0.0))


def nearest_null(
    control: np.ndarray, treatment: np.ndarray, n_control: np.ndarray, n_treatment: np.ndarray, shift: float
) -> np.ndarray:
    """Finds the share x of the control with the least divergence of the alternative from (x, x + ``shift``).

    It minimises n_control KL(control, x) + n_treatment KL(treatment, x + shift), which is convex in x. Where the
    alternative's difference is less than ``shift``, no pair whose difference is ``shift`` or more is nearer.

    Args:
        control: float64 [B], the alternative's share of the control, between 0 and 1.
        treatment: float64 [B], that of the treatment.
        n_control: float64 [B], outcomes of the control in each block.
        n_treatment: float64 [B], those of the treatment.
        shift: The difference, between -1 and 1.
    """
    low = np.full(control.shape, max(0.0, -shift))
    high = np.full(control.shape, min(1.0, 1.0 - shift))
    for _ in range(_BISECTIONS):
        x = (low + high) / 2
        y = x + shift
        # The derivative, times x (1 - x) y (1 - y), which is positive: no division by a share near 0.
        slope = n_control * (x - control) * y * (1 - y) + n_treatment * (y - treatment) * x * (1 - x)
        low, high = np.where(slope < 0, x, low), np.where(slope < 0, high, x)
    middle: np.ndarray = (low + high) / 2
    return middle


def _upper_end(blocks: Blocks, margin: float, needed: float) -> float:
    """Finds the least difference such that it and all larger ones of a grid are ruled out, then refines it."""
    grid = np.linspace(1.0, -1.0, _GRID_STEPS + 1)

    def is_ruled_out(shift: float) -> bool:
        return bool(log_e_values(blocks, shift, margin).max() >= needed)

    # From the far end: an end that is too far out is safe, and evidence need not be monotone in the difference.
    # Its ends need no test: a difference of 1 or -1 bounds every interval.
    inner = next((at for at, shift in enumerate(grid[1:-1], 1) if not is_ruled_out(float(shift))), len(grid) - 1)
    ruled_out, accepted = float(grid[inner - 1]), float(grid[inner])
    for _ in range(9):
        middle = (ruled_out + accepted) / 2
        ruled_out, accepted = (middle, accepted) if is_ruled_out(middle) else (ruled_out, middle)
    return ruled_out


def _last(logs: np.ndarray) -> float:
    # The logarithm is cut, as an exponential overflows.
    return math.exp(min(float(logs[-1]), 27.0)) if len(logs) else 1.0
