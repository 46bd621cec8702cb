"""Population-based bandits (PB2; Parker-Holder et al. 2020, arXiv:2002.02518): children by a Gaussian process."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from posttrain.tune.parameters import Choice
from posttrain.tune.samplers.base import Proposal
from posttrain.tune.samplers.population import PerturbSampler
from posttrain.tune.space import Settings, Space
from posttrain.tune.trial import Fork, Trial

_LENGTHS, _FORGETTING, _NOISES = (0.1, 0.2, 0.5, 1.0, 2.0), (0.0, 0.1, 0.3), (0.01, 0.1, 0.5)
"""The hyperparameters that are tried; the likeliest are taken."""

_MAX_ROWS = 300  # the newest: older ones hardly count, and the time grows with the cube

_CANDIDATES, _NEIGHBOURS, _RADIUS = 500, 200, 0.05

_LIMIT = 2.0  # of standardised improvements: a training that diverges would hide all other differences

_LEAST_VARIANCE = 1e-12  # of values that are all the same

_C1, _C2 = 0.2, 0.4  # of beta_t = c1 + log(c2 t), as Ray's implementation by the authors has them


@dataclass(frozen=True)
class TimeVaryingGp:
    """A Gaussian process over settings and time (Bogunovic et al. 2016, arXiv:1601.06650).

    Its kernel is exp(-|x - x'|^2 / (2 l^2)) (1 - w)^(|t - t'| / 2), times a variance that follows from the values.

    Args:
        points: float64 [n, d].
        times: float64 [n].
        length: l.
        forgetting: w, in [0, 1).
        noise: variance of the noise, as a share of the kernel's.
    """

    points: np.ndarray
    times: np.ndarray
    length: float
    forgetting: float
    noise: float

    def kernel(self, points: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Returns float64 [n, m], the covariances with m other points, without the variance."""
        squares = ((self.points[:, None, :] - points[None, :, :]) ** 2).sum(-1)
        ages = np.abs(self.times[:, None] - times[None, :])
        kernel: np.ndarray = np.exp(-squares / (2 * self.length**2)) * (1 - self.forgetting) ** (ages / 2)
        return kernel

    def log_likelihood(self, values: np.ndarray) -> float:
        """Returns the marginal log-likelihood of float64 [n], at the variance that makes it greatest."""
        count, log_determinant = len(values), 2 * np.log(np.diag(self._factor[0])).sum()
        scale = math.log(2 * math.pi * max(self.variance(values), _LEAST_VARIANCE))
        return float(-0.5 * (count * scale + log_determinant + count))

    def variance(self, values: np.ndarray) -> float:
        """Returns the likeliest variance of the kernel, given float64 [n]."""
        return float(values @ cho_solve(self._factor, values)) / len(values)

    def mean(self, values: np.ndarray, points: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Returns float64 [m], the expected values at m points."""
        mean: np.ndarray = self.kernel(points, times).T @ cho_solve(self._factor, values)
        return mean

    def deviation(self, points: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Returns float64 [m], the standard deviations at m points, without the variance."""
        across = self.kernel(points, times)
        squares = 1 - (across * cho_solve(self._factor, across)).sum(0)
        deviation: np.ndarray = np.sqrt(np.maximum(squares, 0))
        return deviation

    @cached_property
    def _factor(self) -> tuple[np.ndarray, bool]:
        whole = self.kernel(self.points, self.times) + self.noise * np.eye(len(self.points))
        return cho_factor(whole, lower=True)  # type: ignore[no-any-return]


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
        points = np.array([encode(self.space, trial.drawn) for trial, _, _ in rows])
        times, values = (np.array([row[at] for row in rows], np.float64) for at in (1, 2))
        gp, now = likeliest_gp(points, times, values), float(len(ends))
        # The children of this population that come before this one.
        first = 1 + max(trial.number for trial in trials if trial.fork is None)
        siblings = [trial for trial in trials[first:] if trial.fork and trial.fork.step == fork.step]
        tried = replace(
            gp,
            points=np.array([*points, *(encode(self.space, sibling.drawn) for sibling in siblings)]),
            times=np.array([*times, *(now for _ in siblings)]),
        )
        beta = _C1 + max(0.0, math.log(_C2 * len(values)))

        def best(candidates: Sequence[Settings]) -> Settings:
            at = np.array([encode(self.space, candidate) for candidate in candidates])
            when = np.full(len(at), now)
            bounds = gp.mean(values, at, when) + math.sqrt(beta * gp.variance(values)) * tried.deviation(at, when)
            return candidates[int(np.argmax(bounds))]

        generator = self.generator(number)
        settings = best([self.space.draw(generator) for _ in range(_CANDIDATES)])
        return Proposal(best([settings, *self._neighbours(settings, generator)]))

    def _neighbours(self, drawn: Settings, generator: np.random.Generator) -> list[Settings]:
        """Draws feasible points near one, whose numbers differ."""
        center = self.space.to_unit(drawn)
        movable = ~np.isnan(center) & [not isinstance(entry, Choice) for entry in self.space.parameters.values()]
        shifts = generator.normal(0.0, _RADIUS, (_NEIGHBOURS, len(center)))
        points = np.clip(np.nan_to_num(center, nan=0.5) + shifts * movable, 0.0, 1.0)
        candidates = [self.space.from_unit(point) for point in points]
        return [candidate for candidate in candidates if self.space.is_feasible(self.space.complete(candidate))]


def likeliest_gp(points: np.ndarray, times: np.ndarray, values: np.ndarray) -> TimeVaryingGp:
    """Returns the process with the greatest marginal likelihood of some values, among a grid of hyperparameters."""
    grid = [TimeVaryingGp(points, times, *chosen) for chosen in product(_LENGTHS, _FORGETTING, _NOISES)]
    return max(grid, key=lambda gp: gp.log_likelihood(values))


def encode(space: Space, drawn: Settings) -> np.ndarray:
    """Returns a point for the kernel, float64 [d]: shares of the ranges, and choices at a distance of 1.

    A number that does not exist is in the middle of its range, a choice that does not is nearer to all values than they
    are to each other.
    """
    point: list[float] = []
    for name, parameter in space.parameters.items():
        if isinstance(parameter, Choice):
            # Half a unit square: two of these vectors differ by 1.
            index = [known == drawn[name] for known in parameter.values] if name in drawn else []
            point += [math.sqrt(0.5) * equal for equal in index] or [0.0] * len(parameter.values)
        else:
            point.append(parameter.to_unit(drawn[name]) if name in drawn else 0.5)
    return np.array(point)


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
            curves[trial.number][trial.fork.step] = curves[trial.fork.parent][trial.fork.step]
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
