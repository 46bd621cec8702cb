"""Population-based bandits (PB2; Parker-Holder et al. 2020, arXiv:2002.02518): children by a Gaussian process."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from posttrain.tune.gaussian_process import GaussianProcess, Kernel, draw_near, encode, encode_all
from posttrain.tune.samplers.base import Proposal
from posttrain.tune.samplers.population import PerturbSampler
from posttrain.tune.space import Settings
from posttrain.tune.trial import Fork, Trial

_LENGTHS, _FORGETTING, _NOISES = (0.1, 0.2, 0.5, 1.0, 2.0), (0.0, 0.1, 0.3), (0.01, 0.1, 0.5)
"""The hyperparameters that are tried; the likeliest are taken."""

_MAX_ROWS = 300  # the newest: older ones hardly count, and the time grows with the cube

_CANDIDATES, _NEIGHBOURS, _RADIUS = 500, 200, 0.05

_LIMIT = 2.0  # of standardised improvements: a training that diverges would hide all other differences

_C1, _C2 = 0.2, 0.4  # of beta_t = c1 + log(c2 t), as Ray's implementation by the authors has them


@dataclass(frozen=True)
class TimeVaryingKernel(Kernel):
    """The kernel over settings and time of Bogunovic et al. 2016 (arXiv:1601.06650).

    It is exp(-|x - x'|^2 / (2 l^2)) (1 - w)^(|t - t'| / 2) for points whose last coordinate is the time t.

    Args:
        length: l.
        forgetting: w, in [0, 1).
    """

    length: float
    forgetting: float

    def between(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        squares = ((first[:, None, :-1] - second[None, :, :-1]) ** 2).sum(-1)
        ages = np.abs(first[:, None, -1] - second[None, :, -1])
        kernel: np.ndarray = np.exp(-squares / (2 * self.length**2)) * (1 - self.forgetting) ** (ages / 2)
        return kernel


class Pb2Sampler(PerturbSampler):
    """Gives a child the settings with the greatest upper confidence bound of the improvement over an interval.

    A row of data is a trial's improvement over an interval, less the mean and divided by the deviation of all trials
    over the same interval: improvements shrink as a training goes on, which is no merit of settings. Children of the
    same generation count as points that were tried, without a value (Desautels et al. 2014). Choices are equally far
    from each other. Without data a child is perturbed, as by `PerturbSampler`.
    """

    def propose_child(self, number: int, trials: Sequence[Trial], fork: Fork) -> Proposal:
        ends = sorted({*(trial.fork.step for trial in trials if trial.fork and trial.fork.step < fork.step), fork.step})
        rows = list(improvements(trials, ends, self.maximize))[-_MAX_ROWS:]
        if not rows:
            return super().propose_child(number, trials, fork)
        times, values = (np.array([row[at] for row in rows], np.float64) for at in (1, 2))
        points = np.column_stack([encode_all(self.space, (trial.drawn for trial, _, _ in rows)), times])
        gp, now = likeliest_gp(points, values), float(len(ends))
        # The children of this population that come before this one.
        first = 1 + max(trial.number for trial in trials if trial.fork is None)
        siblings = [trial for trial in trials[first:] if trial.fork and trial.fork.step == fork.step]
        tried = replace(
            gp, points=np.array([*points, *(np.append(encode(self.space, other.drawn), now) for other in siblings)])
        )
        beta = _C1 + max(0.0, math.log(_C2 * len(values)))

        def best(candidates: Sequence[Settings]) -> Settings:
            at = encode_all(self.space, candidates)
            at = np.column_stack([at, np.full(len(at), now)])
            bounds = gp.mean(values, at) + math.sqrt(beta * gp.variance(values)) * tried.deviation(at)
            return candidates[int(np.argmax(bounds))]

        generator = self.generator(number)
        settings = best([self.space.draw(generator) for _ in range(_CANDIDATES)])
        return Proposal(best([settings, *draw_near(self.space, settings, _NEIGHBOURS, _RADIUS, generator)]))


def likeliest_gp(points: np.ndarray, values: np.ndarray) -> GaussianProcess:
    """Returns the process with the greatest marginal likelihood of some values, among a grid of hyperparameters."""
    grid = [
        GaussianProcess(points, TimeVaryingKernel(length, forgetting), noise)
        for length, forgetting, noise in product(_LENGTHS, _FORGETTING, _NOISES)
    ]
    return max(grid, key=lambda gp: gp.log_likelihood(values))


def improvements(
    trials: Sequence[Trial], ends: Sequence[int], maximize: bool = False
) -> Iterator[tuple[Trial, int, float]]:
    """Yields trial, interval and improvement of each trial that ran a whole interval, the earliest intervals first.

    The improvements of an interval have a mean of 0 and a deviation of 1, and are clipped at 2.

    Args:
        trials: by number.
        ends: ends of the intervals, ascending; the first interval begins at 0.
        maximize: whether greater values are better.
    """
    curves = [{report.step: report.value for report in trial.reports} for trial in trials]
    for trial in trials:
        if trial.fork:
            parent = curves[trial.fork.parent]
            if trial.fork.step in parent:  # a parent that is excluded has no values
                curves[trial.number][trial.fork.step] = parent[trial.fork.step]
        else:
            # All begin with the same value, which the mean takes away again.
            curves[trial.number][0] = 0.0
    for interval, (start, end) in enumerate(pairwise([0, *ends])):
        members = [trial for trial in trials if curves[trial.number].keys() >= {start, end}]
        gains = np.array([curves[member.number][start] - curves[member.number][end] for member in members])
        if not members:
            continue
        gains = (gains - gains.mean()) / (gains.std() or 1.0) * (-1.0 if maximize else 1.0)
        for member, gain in zip(members, np.clip(gains, -_LIMIT, _LIMIT).tolist(), strict=True):
            yield member, interval, gain
