"""Bayesian optimisation by a Gaussian process: expected or probable improvement, or a confidence bound."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.tune.acquisition import (
    confidence_weight,
    log_expected_improvement,
    log_probability_of_improvement,
    upper_confidence_bound,
)
from posttrain.tune.gaussian_process import GaussianProcess, draw_near, encode_all, fit_matern
from posttrain.tune.losses import MAX_ROWS, newest_and_best, standardize, to_normal
from posttrain.tune.samplers.base import Directions, Proposal, Sampler
from posttrain.tune.samplers.unit_cube import QuasiRandomSampler
from posttrain.tune.space import Settings, Space, point_key
from posttrain.tune.trial import Trial

_CANDIDATES, _STARTS, _NEIGHBOURS = 1_000, 4, 60  # of the search for the greatest acquisition

_DRAWS = 60  # at random, until one is a point that was not tried

_RADII = (0.1, 0.03, 0.01, 0.003)  # of that search, as shares of the ranges

_CHANGED = 0.1  # probability with which the search draws a choice again

_STALLED, _LEAST_GAIN = 10, 0.01  # trials in which the best fell by less than this share of the deviation of all

_RANDOM, _ELSEWHERE = 0.2, 0.6  # shares of points that are then drawn at random, and searched away from the best

_NEAR = 0.3  # correlation with the best above which a point counts as near it

_LEAST_SUCCESS = 0.5  # probability, below which a point is not proposed

Acquisition = Literal["ei", "pi", "ucb"]
"""Expected improvement, probability of improvement, or upper confidence bound."""

Score = Callable[[np.ndarray], np.ndarray]
"""A function of encoded points, float64 [m, d], to float64 [m]."""


@dataclass(frozen=True)
class Regression:
    """A Gaussian process with the values that it was fitted to.

    Args:
        process: the process.
        values: float64 [n], of mean 0.
        pending: float64 [p, d], points that run: nothing is known of their values, but that they will be known
            (Desautels et al. 2014).
    """

    process: GaussianProcess
    values: np.ndarray
    pending: np.ndarray | None = None

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns means and standard deviations, float64 [m] each, at float64 [m, d]."""
        known = self.process
        if self.pending is not None and len(self.pending):
            known = replace(known, points=np.concatenate([known.points, self.pending]))
        deviation = math.sqrt(max(self.process.variance(self.values), 0.0)) * known.deviation(points)
        return self.process.mean(self.values, points), deviation

    def correlation(self, points: np.ndarray, center: np.ndarray) -> np.ndarray:
        """Returns the correlations of the losses at float64 [m, d] with that at float64 [d], float64 [m]."""
        return self.process.kernel.between(points, center[None])[:, 0]


class GaussianProcessSampler(Sampler):
    """Proposes the settings with the greatest acquisition, after some quasi-random ones.

    Values are those of finished trials, or at the greatest step that enough have reported; of diverged trainings they
    are cut, as these would hide all other differences. They are transformed to be nearer to a normal distribution, as
    in HEBO (Cowen-Rivers et al. 2020, arXiv:2012.03826): otherwise the many poor settings decide how the
    process sees the few good ones. Where settings have made trials fail, improvements count by the probability
    that a trial does not, which a second process learns from failures and successes (Gardner et al. 2014), and points
    where a failure is more likely are left out: as the best improves, much would be expected of them alone.
    Conditional parameters that do not exist are in the middle of their range. Once the best has hardly improved for ten
    trials, most points are those with the greatest improvement of the best that lies elsewhere, which would otherwise
    wait until nothing at all can be gained near the best; and each fifth, on average, is drawn at random: a process
    that has seen a few poor values of a choice would never try it again.

    Args:
        startup: trials without a model.
        acquisition: what is greatest at the proposed settings.
    """

    def __init__(
        self,
        space: Space,
        seed: int = 0,
        maximize: Directions = False,
        startup: int = 10,
        acquisition: Acquisition = "ei",
    ) -> None:
        super().__init__(space, seed, maximize)
        self._startup, self._acquisition = startup, acquisition
        self._initial = QuasiRandomSampler(space, seed, maximize)

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal:
        generator = self.generator(number)
        losses = self.comparable_losses(trials)
        if len(losses) < self._startup:
            return self._initial.propose(number, trials)
        chance = generator.random() if self._has_stalled(losses) else 1.0
        if chance < _RANDOM:
            return Proposal(self._draw_new(trials, generator))
        predictor, best = self._fit(trials, losses, generator)
        starts = [trials[number].drawn for number in sorted(losses, key=lambda number: (losses[number], number))]
        center = None
        if chance < _RANDOM + _ELSEWHERE:
            points = encode_all(self.space, starts)
            far = predictor.correlation(points, points[0]) < _NEAR
            if far.any():
                center, best = points[0], float(predictor.predict(points[far])[0].min())
                starts = [start for start, is_far in zip(starts, far, strict=True) if is_far]
        score = self._score(predictor, best, trials, generator)
        if center is not None:
            score = _only_far(score, predictor, center)
        return Proposal(self._search(score, starts[:_STARTS], generator, [trial.drawn for trial in trials]))

    def _fit(
        self, trials: Sequence[Trial], losses: dict[int, float], generator: np.random.Generator
    ) -> tuple[Regression, float]:
        """Returns the model of standardised losses, and the least of these.

        Args:
            trials: all trials.
            losses: their losses by number, without those that have none.
            generator: source of random numbers.
        """
        numbers = newest_and_best(losses)
        values = _standardize([losses[number] for number in numbers])
        points = encode_all(self.space, (trials[number].drawn for number in numbers))
        pending = [trial.drawn for trial in trials if not trial.ended and trial.number not in losses]
        process = fit_matern(points, values, generator)
        return Regression(process, values, encode_all(self.space, pending)), float(values.min())

    def _has_stalled(self, losses: dict[int, float]) -> bool:
        """Returns whether the newest trials have hardly improved the best."""
        if len(losses) <= _STALLED:
            return False
        values = _standardize([losses[number] for number in sorted(losses)])
        return float(values[:-_STALLED].min() - values.min()) < _LEAST_GAIN

    def _draw_new(self, trials: Sequence[Trial], generator: np.random.Generator) -> Settings:
        """Draws a point that was not tried, unless hardly any is left."""
        tried = {point_key(trial.drawn) for trial in trials}
        draws = (self.space.draw(generator) for _ in range(_DRAWS))
        return next((drawn for drawn in draws if point_key(drawn) not in tried), None) or self.space.draw(generator)

    def _score(
        self, predictor: Regression, best: float, trials: Sequence[Trial], generator: np.random.Generator
    ) -> Score:
        """Returns the acquisition, a function of encoded points."""
        log_success = self._log_success(trials, generator)
        beta = confidence_weight(len(trials), len(self.space.parameters))

        def score(points: np.ndarray) -> np.ndarray:
            mean, deviation = predictor.predict(points)
            if self._acquisition == "ucb":
                return upper_confidence_bound(mean, deviation, beta)
            improvement = log_probability_of_improvement if self._acquisition == "pi" else log_expected_improvement
            total = improvement(mean, deviation, best)
            return total if log_success is None else total + log_success(points)

        return _only_likely(score, log_success)

    def _log_success(self, trials: Sequence[Trial], generator: np.random.Generator) -> Score | None:
        """Returns the logarithm of the probability that a trial does not fail, a function of encoded points.

        It learns from trials that have ended, but for those that were killed; None where none of them has failed by its
        settings, or all have.
        """
        ended = [trial for trial in trials if trial.has_bad_settings or (trial.ended and trial.latest is not None)]
        ended = ended[-MAX_ROWS:]
        labels = np.array([-1.0 if trial.has_bad_settings else 1.0 for trial in ended])
        if len(np.unique(labels)) < 2:
            return None
        process = fit_matern(encode_all(self.space, (trial.drawn for trial in ended)), labels, generator)
        model = Regression(process, labels)

        def log_probability(points: np.ndarray) -> np.ndarray:
            # The sign of a regression on -1 and 1 (Rasmussen and Williams 2006, section 6.5).
            mean, deviation = model.predict(points)
            return log_probability_of_improvement(-mean, deviation, 0.0)

        return log_probability

    def _search(
        self,
        score: Score,
        starts: Sequence[Settings],
        generator: np.random.Generator,
        tried: Sequence[Settings],
    ) -> Settings:
        """Returns the point with the greatest score: of random ones, of those near good trials, and near the best.

        Args:
            score: a function of encoded points.
            starts: points to search near.
            generator: source of random numbers.
            tried: points that are proposed only where nothing else was drawn. On a grid the greatest score is often
                that of a known point: a scheduler of partial trainings would ask for the same one again and again.
        """
        seen = {point_key(drawn) for drawn in tried}

        def unseen(points: Sequence[Settings]) -> list[Settings]:
            new = {point_key(point): point for point in points if point_key(point) not in seen}
            seen.update(new)
            return list(new.values())

        drawn = [self.space.draw(generator) for _ in range(_CANDIDATES)]
        candidates = unseen([*drawn, *(point for start in starts for point in self._near(start, 0.05, generator))])
        if not candidates:
            return drawn[0]
        scores = score(encode_all(self.space, candidates))
        for radius in _RADII:
            order = np.argsort(-scores, kind="stable")[:_STARTS]
            kept = [candidates[at] for at in order]
            near = unseen([point for start in kept for point in self._near(start, radius, generator)])
            candidates = [*kept, *near]
            scores = np.concatenate([scores[order], score(encode_all(self.space, near))]) if near else scores[order]
        return candidates[int(np.argmax(scores))]

    def _near(self, drawn: Settings, radius: float, generator: np.random.Generator) -> list[Settings]:
        return [*draw_near(self.space, drawn, _NEIGHBOURS, radius, generator, _CHANGED)]


def _standardize(losses: Sequence[float]) -> np.ndarray:
    """Returns losses as a process is fitted to them, float64 [n] of mean 0 and deviation 1."""
    return to_normal(standardize(losses))


def _only_likely(score: Score, log_success: Score | None) -> Score:
    """Returns the score without points where a trial probably fails; None: as it is."""
    if log_success is None:
        return score
    return lambda points: np.where(log_success(points) >= math.log(_LEAST_SUCCESS), score(points), -np.inf)


def _only_far(score: Score, predictor: Regression, center: np.ndarray) -> Score:
    """Returns the score without points near a center, float64 [d]."""
    return lambda points: np.where(predictor.correlation(points, center) < _NEAR, score(points), -np.inf)


def gaussian_process(
    space: Space,
    seed: int,
    maximize: Directions,
    startup: Annotated[int, Field(ge=1)] = 10,
    acquisition: Acquisition = "ei",
) -> Sampler:
    """Returns the `GaussianProcessSampler`, or for several objectives Optuna's.

    That one proposes by the logarithm of the expected improvement of the hypervolume (Daulton et al. 2020,
    arXiv:2006.05078). It models the parameters that all trials have, and draws conditional ones at random.

    Args:
        startup: trials without a model.
        acquisition: as `GaussianProcessSampler` takes it; of one objective.

    Raises:
        UserError: there are several objectives and another acquisition than ``ei``.
    """
    if isinstance(maximize, bool) or len(maximize) == 1:
        return GaussianProcessSampler(space, seed, maximize, startup, acquisition)
    from optuna.samplers import GPSampler

    from posttrain.tune.samplers.optuna_sampler import OptunaSampler

    if acquisition != "ei":
        what = f"`{acquisition}` is of one objective, and there are {len(maximize)}"
        raise UserError(what, where="sampler.acquisition", fix="leave it out")

    def make(seed: int) -> GPSampler:
        return GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)

    return OptunaSampler(space, seed, maximize, make)
