"""Searches a merge's numbers for the highest score: by coordinates, a Gaussian process, or differential evolution.

The score is a function that the caller hands over, so that nothing here knows suites. Finished trials are kept in a
file. The methods draw nothing but from their seed, so that a search that was killed asks for the same trials in the
same order, gets the scores of the finished ones from the file, and goes on as if nothing had happened.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from posttrain.merge.trials import Scores, Trial, TrialJournal, mean_score, paired_difference
from posttrain.store.errors import UserError

SearchMethod = Literal["coordinate", "bayesian", "evolutionary"]

Evaluate = Callable[[Mapping[str, float]], Iterator[Scores]]
"""Merges with these numbers and yields the scores of the next part of each suite, until it is closed."""

_STEPS = (0.25, 1 / 64)  # first and last step of the coordinate search, as shares of a variable's range

_ERROR_RATE = 0.05  # probability that a trial which is as good as the best is stopped, over all looks at it

_LEAST_RECORDS = 16  # read before a trial may be stopped: a variance of fewer says nothing

_DIGITS = 4  # decimals of a coefficient, so that the recipe that is written is the one that was measured


@dataclass(frozen=True)
class Variable:
    """A number to search.

    Attributes:
        name: its name.
        low: its least value; ``high`` its greatest.
        start: its value in the first trial.
    """

    name: str
    low: float
    high: float
    start: float

    def at(self, share: float) -> float:
        """Returns the value at a share of the range."""
        return round(min(max(self.low + share * (self.high - self.low), self.low), self.high), _DIGITS)


@dataclass(frozen=True)
class SearchResult:
    """A finished search.

    Attributes:
        trials: in their order.
        best: the trial with the highest score among those that read all records; the first of equal ones.
        end: the reason why it ended.
    """

    trials: Sequence[Trial]
    best: Trial
    end: str


def search(
    evaluate: Evaluate,
    variables: Sequence[Variable],
    sizes: Sequence[int],
    *,
    method: SearchMethod = "bayesian",
    trials: int = 30,
    patience: int = 15,
    seed: int = 0,
    journal: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> SearchResult:
    """Searches the numbers with the highest score.

    Trial 0 has the variables' start values. A trial whose records are read in parts is stopped after a part if the
    upper bound of its score minus the best trial's, on the same records, is below 0: mean difference plus Student's t
    times its standard error, one-sided at 1 - 0.05 / (parts - 1), which bounds the probability to lose an equal trial
    over all looks at 5% (Bonferroni; races, Maron and Moore 1994, with paired differences in place of two separate
    bounds, as what makes a record hard cancels). The variance has the factor 1 - n/N of samples without replacement.

    Methods: ``coordinate`` polls each variable up and down, moves where the score rises, and halves the step where it
    rises nowhere (compass search; Kolda, Lewis and Torczon 2003). ``bayesian`` fits a Gaussian process with a Matérn
    kernel (nu = 5/2) and takes the point of greatest expected improvement (Jones et al. 1998). ``evolutionary`` is
    differential evolution (Storn and Price 1997; SciPy's); mergekit's is CMA-ES.

    Args:
        evaluate: merges and scores; see `Evaluate`.
        variables: the numbers.
        sizes: number of records of each suite.
        method: how the next numbers are chosen.
        trials: at most so many merges.
        patience: ends after so many proposals on end without a higher score; numbers that were measured before count
            as a proposal and not as a trial.
        seed: of the methods that draw.
        journal: file of the finished trials, from which the search resumes; None keeps none.
        settings: JSON values that decide the scores; a journal of others is refused.

    Raises:
        UserError: there is nothing to search, or the journal is of another search.
    """
    if not variables:
        raise UserError("has no number to search", where="search", fix="name one in `space`")
    header = {
        "settings": dict(settings or {}),
        "variables": [asdict(variable) for variable in variables],
        "method": method,
        "seed": seed,
        "sizes": list(sizes),
    }
    objective = _Objective(evaluate, variables, sizes, trials, patience, TrialJournal(journal, header))
    start = np.array(
        [
            (variable.start - variable.low) / (variable.high - variable.low) if variable.high > variable.low else 0.0
            for variable in variables
        ]
    ).clip(0, 1)
    try:
        _METHODS[method](objective, start, seed)
        end = f"{method} search has converged"
    except _Finished as finished:
        end = str(finished)
    assert objective.best is not None, "the first trial is never stopped"
    return SearchResult(objective.trials, objective.best, end)


class _Finished(Exception):
    """The search ends, for the reason that it says."""


class _Objective:
    """Returns the trial at a point of the unit cube; counts, records and ends the search."""

    def __init__(
        self,
        evaluate: Evaluate,
        variables: Sequence[Variable],
        sizes: Sequence[int],
        trials: int,
        patience: int,
        journal: "TrialJournal",
    ) -> None:
        self._evaluate, self._variables, self._sizes = evaluate, variables, sizes
        self.limit, self._patience, self._journal = trials, patience, journal
        self.proposals = 0
        self.trials: list[Trial] = []
        self.points: list[np.ndarray] = []
        self.best: Trial | None = None
        self._without_gain = 0

    def __call__(self, point: np.ndarray) -> float:
        if self._without_gain >= self._patience:
            raise _Finished(f"no higher score in {self._patience} proposals")
        self.proposals += 1
        point = np.clip(np.asarray(point, np.float64), 0, 1)
        values = {variable.name: variable.at(share) for variable, share in zip(self._variables, point, strict=True)}
        if (known := next((trial for trial in self.trials if trial.values == values), None)) is not None:
            self._without_gain += 1
            return known.score
        if len(self.trials) == self.limit:
            raise _Finished(f"{self.limit} trials")
        trial = self._journal.trial(len(self.trials), values)
        if trial is None:
            trial = self._run(len(self.trials), values)
            self._journal.append(trial)
        self.trials.append(trial)
        self.points.append(point)
        if not trial.stopped and (self.best is None or trial.score > self.best.score):
            self.best, self._without_gain = trial, 0
        else:
            self._without_gain += 1
        return trial.score

    def _run(self, number: int, values: dict[str, float]) -> Trial:
        scores: Scores = [[] for _ in self._sizes]
        parts = self._evaluate(values)
        looks = 0
        try:
            for part in parts:
                for suite, more in zip(scores, part, strict=True):
                    suite += [float(score) for score in more]
                looks += 1
                whole = [len(suite) for suite in scores] == list(self._sizes)
                if whole:
                    break
                if self.best is not None:
                    mean, variance = paired_difference(scores, self.best.scores, self._sizes)
                    count = sum(map(len, scores))
                    level = 1 - _ERROR_RATE / max(1, -(-sum(self._sizes) // max(count // looks, 1)) - 1)
                    if count >= _LEAST_RECORDS and mean + _student(level, count - len(scores)) * variance**0.5 < 0:
                        return Trial(number, values, scores, True, self.best.score + mean, variance)
        finally:
            if hasattr(parts, "close"):
                parts.close()
        if [len(suite) for suite in scores] != list(self._sizes):
            raise ValueError(f"scores of {[len(suite) for suite in scores]} records, and {list(self._sizes)} are asked")
        return Trial(number, values, scores, False, mean_score(scores), 0.0)


def _student(level: float, freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(level, max(freedom, 1)))


def _coordinate(objective: _Objective, start: np.ndarray, seed: int) -> None:
    point, best = start.copy(), objective(start)
    step, last = _STEPS
    while step >= last:
        moved = False
        for axis in range(len(point)):
            for sign in (1, -1):
                candidate = point.copy()
                candidate[axis] = np.clip(point[axis] + sign * step, 0, 1)
                if candidate[axis] != point[axis] and (score := objective(candidate)) > best:
                    point, best, moved = candidate, score, True
                    break
        if not moved:
            step /= 2


def _bayesian(objective: _Objective, start: np.ndarray, seed: int) -> None:
    from scipy.stats import qmc

    objective(start)
    for point in qmc.LatinHypercube(len(start), rng=seed).random(max(4, 2 * len(start))):
        objective(point)
    while True:
        # By the proposals, not the trials: a point that is known would be proposed for ever.
        objective(_most_promising(objective, np.random.default_rng([seed, objective.proposals])))


def _most_promising(objective: _Objective, generator: np.random.Generator) -> np.ndarray:
    """Returns the point of greatest expected improvement over the highest mean at a point that was measured."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern, WhiteKernel

    points = np.array(objective.points)
    scores = np.array([trial.score for trial in objective.trials])
    spread = float(scores.std()) or 1.0
    # Scaled here, as the noise of stopped trials must be scaled with them.
    values = (scores - scores.mean()) / spread
    noise = np.array([trial.variance for trial in objective.trials]) / spread**2
    dimensions = points.shape[1]
    kernel = Matern(np.full(dimensions, 0.3), (0.05, 5.0), nu=2.5) + WhiteKernel(1e-3, (1e-6, 0.5))
    process = GaussianProcessRegressor(kernel, alpha=noise + 1e-8, random_state=0)
    with warnings.catch_warnings():
        # A length at the end of its range is as good as any: equal scores say nothing about it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit(points, values)
    incumbent = points[int(process.predict(points).argmax())]
    near = incumbent + generator.normal(0, 0.05, (256, dimensions))
    candidates = np.concatenate([generator.random((1024, dimensions)), near.clip(0, 1)])
    mean, deviation = process.predict(candidates, return_std=True)
    return np.asarray(candidates[int(expected_improvement(mean, deviation, process.predict(points).max()).argmax())])


def expected_improvement(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """Returns E[max(X - best, 0)] for X normal with this mean and deviation (Jones et al. 1998, equation 15)."""
    from scipy.stats import norm

    gain = mean - best
    with np.errstate(divide="ignore", invalid="ignore"):
        z = gain / deviation
        value = gain * norm.cdf(z) + deviation * norm.pdf(z)
    return np.where(deviation > 0, value, np.maximum(gain, 0))


def _evolutionary(objective: _Objective, start: np.ndarray, seed: int) -> None:
    from scipy.optimize import differential_evolution
    from scipy.stats import qmc

    dimensions = len(start)
    # Small, as a merge is measured in minutes: a third of the trials, and at least the five that SciPy asks for.
    size = min(max(5, objective.limit // 3), 10 * dimensions + 5)
    population = qmc.LatinHypercube(dimensions, rng=seed).random(size)
    population[0] = start
    differential_evolution(
        lambda point: -objective(point),
        [(0.0, 1.0)] * dimensions,
        init=population,
        maxiter=10**6,
        tol=0,
        polish=False,
        rng=seed,
    )


_METHODS: dict[str, Callable[[_Objective, np.ndarray, int], None]] = {
    "coordinate": _coordinate,
    "bayesian": _bayesian,
    "evolutionary": _evolutionary,
}
