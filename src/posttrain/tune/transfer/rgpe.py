"""The ranking-weighted Gaussian process ensemble over earlier studies (RGPE; Feurer et al. 2018, arXiv:1802.02219)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.tune.gaussian_process import encode_all, fit_matern
from posttrain.tune.losses import newest_and_best
from posttrain.tune.samplers.base import SearchContext
from posttrain.tune.samplers.gaussian import GaussianProcessSampler, Predictor, Regression
from posttrain.tune.transfer.warm_start import carry_over
from posttrain.tune.trial import Trial, TrialState

_SAMPLES = 1_000  # of the bootstrap, S

_LEAST = 3  # trials with a value, before which all sources count alike and the target does not


@dataclass(frozen=True)
class Ensemble:
    """The weighted mean of models; its variance is the sum of w² σ².

    Args:
        models: of the sources, and of the target last.
        weights: float64 [models], which add up to 1.
    """

    models: Sequence[Predictor]
    weights: np.ndarray

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns means and standard deviations, float64 [m] each, at float64 [m, d]."""
        used = [
            (weight, *model.predict(points)) for weight, model in zip(self.weights, self.models, strict=True) if weight
        ]
        mean: np.ndarray = np.sum([weight * each for weight, each, _ in used], axis=0)
        deviation: np.ndarray = np.sqrt(np.sum([(weight * each) ** 2 for weight, _, each in used], axis=0))
        return mean, deviation

    def correlation(self, points: np.ndarray, center: np.ndarray) -> np.ndarray:
        """Returns the correlations of the target's losses at float64 [m, d] with that at float64 [d], float64 [m]."""
        return self.models[-1].correlation(points, center)


class RgpeSampler(GaussianProcessSampler):
    """Proposes as ``gp`` does, by an ensemble of a process for each source study and one for the study itself.

    A source counts by how well it ranks the trials of this study, and before there are three by an equal share. It is
    fitted to losses of mean 0 and deviation 1; settings that it lacks have their default in its data. With sources the
    ensemble proposes from the first trial on; without any this is ``gp``.

    Args:
        startup, noise, acquisition: as `GaussianProcessSampler` takes them; ``startup`` counts without sources.
    """

    _sources: Sequence[Regression] = ()

    def begin(self, context: SearchContext) -> None:
        super().begin(context)
        sources: list[Regression] = []
        for study in context.sources:
            losses = study.losses()
            numbers = newest_and_best(losses)
            drawn = {
                number: carry_over(study.trials[number].settings, self.space, context.defaults) for number in numbers
            }
            points = {number: point for number, point in drawn.items() if point is not None}
            if len(points) < _LEAST:
                continue
            values = self.standardize([losses[number] for number in points])
            # Of its own generator, as sources are the same for each trial.
            generator = np.random.default_rng(self.seed)
            process = fit_matern(encode_all(self.space, points.values()), values, generator)
            sources.append(Regression(process, values))
        self._sources = sources
        if sources:
            self._startup = 0

    def fit(
        self, trials: Sequence[Trial], losses: dict[int, float], generator: np.random.Generator
    ) -> tuple[Predictor, float]:
        if not self._sources:
            return super().fit(trials, losses, generator)
        few = len(losses) < _LEAST
        # Points that nothing is known of, though trials have them.
        asked = (trial for trial in trials if trial.state is not TrialState.EXCLUDED)
        pending = [trial.drawn for trial in asked if few or not trial.ended]
        sources = [replace(source, pending=encode_all(self.space, pending)) for source in self._sources]
        if few:
            ensemble = Ensemble(sources, np.full(len(sources), 1 / len(sources)))
            if not losses:
                return ensemble, min(float(source.values.min()) for source in sources)
            points = encode_all(self.space, (trials[number].drawn for number in losses))
            return ensemble, float(ensemble.predict(points)[0].min())
        model, best = super().fit(trials, losses, generator)
        assert isinstance(model, Regression)
        points = model.process.points
        predictions = np.array(
            [*(source.predict(points)[0] for source in sources), model.process.leave_one_out(model.values)]
        )
        total = self.context.budget.trials
        used = 0.0 if total is None else len(trials) / total
        weights = rank_weights(predictions, model.values, used, generator)
        return Ensemble([*sources, model], weights), best


def misranked(predictions: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns which pairs each model ranks in the wrong order, bool [models, n, n]; no value is paired with itself.

    Args:
        predictions: float64 [models, n]; of the last one, the target, each without the value itself, which is compared
            with the values of the others.
        values: float64 [n].
    """
    less = values[:, None] < values[None]
    sources = predictions[:-1, :, None] < predictions[:-1, None]
    target = predictions[-1][:, None] < values[None]
    pairs = ~np.eye(len(values), dtype=bool)  # of a trial and itself the target's prediction and value differ
    return np.array([*(sources ^ less), target ^ less]) & pairs


def rank_weights(
    predictions: np.ndarray, values: np.ndarray, used: float, generator: np.random.Generator, samples: int = _SAMPLES
) -> np.ndarray:
    """Returns the weight of each model, float64 [models], adding up to 1.

    A model's weight is the share of bootstrap samples of the trials in which it ranks best, ties divided.
    Against dilution by many poor sources, source i is first dropped with the probability
    1 - (1 - used) P(loss_i < loss_target), so that with the budget all weight goes to the target.

    Args:
        predictions: as `misranked` takes them.
        values: float64 [n].
        used: share of the trials that the study may have, n / H.
        generator: draws the samples, and what is dropped.
        samples: S.
    """
    count = len(values)
    rows = generator.integers(count, size=(samples, count))
    # How often a sample has each trial: a pair of trials counts as often as both are drawn.
    times = np.apply_along_axis(np.bincount, 1, rows, minlength=count).astype(np.float64)
    pairs = misranked(predictions, values).astype(np.float64)
    losses = np.array([((times @ matrix) * times).sum(1) for matrix in pairs]).T
    keep = (losses[:, :-1] < losses[:, -1:]).mean(0) * (1 - min(1.0, used))
    dropped = generator.random(len(keep)) >= keep
    losses[:, :-1][:, dropped] = np.inf
    best = losses == losses.min(1, keepdims=True)
    weights: np.ndarray = (best / best.sum(1, keepdims=True)).mean(0)
    return weights
