"""The model-based half of BOHB (Falkner et al. 2018, arXiv:1807.01774); with the scheduler ``hyperband`` it is BOHB.

A density of good points and one of bad points are estimated at the greatest step that enough trials have reached, so
that early values guide the search until there are later ones.
"""

import math
from collections.abc import Sequence

import numpy as np

from posttrain.tune.parameters import Choice
from posttrain.tune.parts import check_ranges
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial, TrialState

_MAX_DRAWS = 100  # of the candidates of one trial, until one meets the constraints


class BohbSampler(Sampler):
    """Draws candidates near good points, and proposes that with the greatest ratio of the two densities, good / bad.

    With n trials at a step, the good ones are the max(d + 1, share n) best, for d parameters, and the bad ones the
    max(d + 1, n - good) worst, and with them all trials that failed by their settings; there is no model before
    n = d + 3. Numbers have normal kernels on the unit cube, cut at its ends, with the bandwidths of the normal
    reference rule; choices those of Aitchison and Aitken. A parameter that a point lacks is filled in from another
    point that has it, or at random.

    Args:
        share: of trials that are good; the paper's gamma.
        candidates: points that are drawn for each proposal.
        random: share of proposals that are drawn uniformly; the paper's rho.
        width: factor of the bandwidths from which candidates are drawn.

    Raises:
        UserError: an option is out of its range.
    """

    def __init__(
        self,
        space: Space,
        seed: int = 0,
        maximize: bool = False,
        share: float = 0.15,
        candidates: int = 64,
        random: float = 1 / 3,
        width: float = 3.0,
    ) -> None:
        super().__init__(space, seed, maximize)
        check_ranges(
            "sampler",
            {
                "share": (share, 0 < share < 1, "a share between 0 and 1"),
                "candidates": (candidates, candidates >= 1, "at least 1"),
                "random": (random, 0 <= random <= 1, "0 to 1"),
                "width": (width, width > 0, "more than 0"),
            },
        )
        self._share, self._candidates, self._random, self._width = share, int(candidates), random, width
        # Number of values of a choice; 0 of a number.
        self._kinds = np.array(
            [
                len(parameter.values) if isinstance(parameter, Choice) else 0
                for parameter in self.space.parameters.values()
            ]
        )
        self._seen: list[Trial] = []
        self._values: dict[float, dict[int, float]] = {}  # losses by step, by trial
        self._failed: dict[int, None] = {}  # trials whose settings are bad, whatever the step

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal:
        self._update(trials)
        generator = self.generator(number)
        split = None if generator.random() < self._random else self._split()
        if split is not None:
            good, bad = (self._fill(np.array([self._point(trials[at]) for at in part]), generator) for part in split)
            for _ in range(_MAX_DRAWS):
                point = self._draw(good, bad, generator)
                drawn = self.space.from_unit(point)
                if self.space.is_feasible(self.space.complete(drawn)):
                    return Proposal(drawn)
        return Proposal(self.space.draw(generator))

    def _update(self, trials: Sequence[Trial]) -> None:
        """Enters the values of trials that are new or have changed."""
        sign = -1.0 if self.maximize else 1.0
        for trial in trials:
            if trial.number < len(self._seen) and self._seen[trial.number] is trial:
                continue
            if trial.number < len(self._seen):
                self._seen[trial.number] = trial
            else:
                self._seen.append(trial)
            for values in self._values.values():
                values.pop(trial.number, None)
            if trial.state is TrialState.FAILED:
                if trial.has_bad_settings:
                    self._failed[trial.number] = None
                continue
            for report in trial.reports:
                self._values.setdefault(report.step, {})[trial.number] = sign * report.value
            if trial.value is not None and not trial.reports:
                self._values.setdefault(math.inf, {})[trial.number] = sign * trial.value

    def _split(self) -> tuple[list[int], list[int]] | None:
        """Returns the good and the bad trials of the greatest step that has enough; None if none has."""
        least = len(self._kinds) + 1
        for step in sorted(self._values, reverse=True):
            values = self._values[step]
            if len(values) >= least + 2:
                ranked = sorted(values, key=lambda number: (values[number], number))
                good = max(least, int(self._share * len(ranked)))
                return ranked[:good], [*ranked[-max(least, len(ranked) - good) :], *sorted(self._failed)]
        return None

    def _point(self, trial: Trial) -> np.ndarray:
        known = {name: value for name, value in trial.drawn.items() if value in self.space.parameters[name]}
        return self.space.to_unit(known)

    def _fill(self, points: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        for column in points.T:
            missing = np.isnan(column)
            known = column[~missing]
            drawn = generator.choice(known, missing.sum()) if known.size else generator.random(missing.sum())
            column[missing] = drawn
        return points

    def _draw(self, good: np.ndarray, bad: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns the best of the candidates, a point of the unit cube."""
        from scipy.stats import truncnorm

        numbers = self._kinds == 0
        bandwidths = kernel_bandwidths(good, self._kinds)
        candidates = good[generator.integers(len(good), size=self._candidates)]
        widths = bandwidths[numbers] * self._width
        centres = candidates[:, numbers]
        candidates[:, numbers] = truncnorm.rvs(
            -centres / widths, (1 - centres) / widths, loc=centres, scale=widths, random_state=generator
        )
        for column in np.flatnonzero(~numbers):
            # The kernel's own draw: the value stays with probability 1 - bandwidth.
            redrawn = generator.random(self._candidates) < bandwidths[column]
            count = self._kinds[column]
            candidates[redrawn, column] = (generator.integers(count, size=redrawn.sum()) + 0.5) / count
        ratio = log_density(candidates, good, bandwidths, self._kinds) - log_density(
            candidates, bad, kernel_bandwidths(bad, self._kinds), self._kinds
        )
        best: np.ndarray = candidates[int(np.argmax(ratio))]
        return best


def kernel_bandwidths(points: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Returns the bandwidth of each parameter by the normal reference rule, 1.06 σ n^(-1 / (4 + d)).

    Args:
        points: float64 of shape (n, d), on the unit cube.
        kinds: int of shape (d,): number of values of a choice, 0 of a number.

    Returns:
        float64 of shape (d,). A choice's is that of its index, cut at (c - 1) / c, where its kernel is uniform. Each is
        at least 1 / (1 + n), or 1 / 100, as in Optuna's TPE: with the 0.001 of the paper's program, good points that
        lie together soon draw nothing but their like.
    """
    count, dimensions = points.shape
    scale = np.where(kinds > 0, kinds, 1)
    bandwidths = 1.06 * (points * scale).std(axis=0) * count ** (-1 / (4 + dimensions))
    most = np.where(kinds > 0, 1 - 1 / scale, 1.0)
    result: np.ndarray = np.clip(bandwidths, 1 / min(100, 1 + count), most)
    return result


def log_density(candidates: np.ndarray, points: np.ndarray, bandwidths: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Returns the logarithm of a kernel density.

    Args:
        candidates: float64 of shape (m, d), where it is asked for.
        points: float64 of shape (n, d), of which it is estimated.
        bandwidths, kinds: as `kernel_bandwidths` returns and takes them.

    Returns:
        float64 of shape (m,). The density of a number's kernel integrates to 1 over [0, 1]; a choice's kernel sums to 1
        over its values (Aitchison and Aitken 1976).
    """
    from scipy.special import logsumexp, ndtr

    numbers = kinds == 0
    width = bandwidths[numbers]
    distance = (candidates[:, None, numbers] - points[None, :, numbers]) / width
    inside = ndtr((1 - points[:, numbers]) / width) - ndtr(-points[:, numbers] / width)
    logs = (-0.5 * distance**2 - np.log(math.sqrt(2 * math.pi) * width) - np.log(inside)).sum(axis=2)
    for column in np.flatnonzero(~numbers):
        equal = np.isclose(candidates[:, None, column], points[None, :, column])
        width, count = bandwidths[column], kinds[column]
        logs += np.log(np.where(equal, 1 - width, width / (count - 1)))
    result: np.ndarray = logsumexp(logs, axis=1) - math.log(len(points))
    return result
