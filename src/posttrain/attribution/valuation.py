"""Data valuation methods by name, and cross-validated values, which need no separate evaluation records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from posttrain.attribution.data_oob import data_oob
from posttrain.attribution.groups import group_utility, sum_by_group
from posttrain.attribution.knn_shapley import knn_shapley
from posttrain.attribution.sampled_semivalues import banzhaf, beta_shapley, tmc_shapley
from posttrain.attribution.semivalues import leave_one_out
from posttrain.attribution.utilities.knn import KNNUtility
from posttrain.attribution.utilities.linear import CentroidUtility, RidgeUtility
from posttrain.attribution.utility import Floats, Rows, Utility, check_features, check_labels
from posttrain.attribution.values import Values
from posttrain.store.errors import UserError, suggest

LEARNERS: Mapping[str, Callable[..., Utility]] = {
    "neighbours": KNNUtility,
    "centroids": CentroidUtility,
    "ridge": RidgeUtility,
}
"""What learns from the records in a game, by name."""

DEFAULT_DRAWS: Mapping[str, int | None] = {
    "knn_shapley": None,
    "tmc_shapley": 100,
    "beta_shapley": 100,
    "banzhaf": 2000,
    "leave_one_out": None,
    "data_oob": 400,
}
"""By method what is drawn at random unless the caller says: permutations, sets or bags; None where nothing is."""

_OWN_LEARNER = ("knn_shapley", "data_oob")

DATA_OOB = "data_oob"
"""The one method that holds nothing out, and whose values are shares of right predictions."""


@dataclass(frozen=True)
class Fold:
    """What one part of the records says about the others.

    Attributes:
        features: float64 [n, D] of the records that are worth something here.
        labels: [n].
        evaluation_features: float64 [m, D] of the part that was held out.
        evaluation_labels: [m], the same set of classes as ``labels``.
        groups: int64 [n] in 0..G-1, each with a record, where groups are the players; else None.
    """

    features: Floats
    labels: npt.NDArray[Any]
    evaluation_features: Floats
    evaluation_labels: npt.NDArray[Any]
    groups: Rows | None


@dataclass(frozen=True)
class ValuationMethod:
    """A method with its settings.

    Attributes:
        name: one of `DEFAULT_DRAWS`.
        learner: one of `LEARNERS`, for those that play a game with it; neighbours where None.
        draws: how much is drawn at random; the method's own number where None.
        seed: of what is drawn.
        workers: processes; their number changes no digit.
        folder: keeps finished work, so that a killed call goes on.

    Raises:
        UserError: there is no such method or learner, or nothing to draw.
    """

    name: str
    learner: str | None = None
    draws: int | None = None
    seed: int = 0
    workers: int = 1
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.name not in DEFAULT_DRAWS:
            raise UserError(f"no method `{self.name}`; {suggest(self.name, DEFAULT_DRAWS)}", where="--method")
        if self.learner is not None and self.name in _OWN_LEARNER:
            raise UserError(f"{self.name} has a learner of its own", where="--learner", fix="leave it out")
        if self.learner is not None and self.learner not in LEARNERS:
            raise UserError(f"no learner `{self.learner}`; {suggest(self.learner, LEARNERS)}", where="--learner")
        if self.draws is not None and DEFAULT_DRAWS[self.name] is None:
            raise UserError(f"{self.name} draws nothing at random", where="--draws", fix="leave it out")

    def __call__(self, part: Fold) -> Values:
        """The values of a part's records or groups: a `CooperativeGame`.

        Groups are the players themselves, but for `knn_shapley`, whose values add up.
        """
        task = (part.features, part.labels, part.evaluation_features, part.evaluation_labels)
        if self.name == "knn_shapley":
            values = knn_shapley(*task)
            return values if part.groups is None else sum_by_group(values, part.groups)
        utility = LEARNERS[self.learner or "neighbours"](*task)
        if part.groups is not None:
            utility = group_utility(utility, part.groups)
        drawn, count = {"seed": self.seed, "workers": self.workers, "folder": self.folder}, self._count
        if self.name == "tmc_shapley":
            return tmc_shapley(utility, permutations=count, **drawn)  # type: ignore[arg-type]
        if self.name == "beta_shapley":
            return beta_shapley(utility, permutations=count, **drawn)  # type: ignore[arg-type]
        if self.name == "banzhaf":
            return banzhaf(utility, samples=count, **drawn)  # type: ignore[arg-type]
        return leave_one_out(utility, workers=self.workers, folder=self.folder)

    def out_of_bag(self, features: np.ndarray, labels: list[str]) -> Values:
        """Data-OOB of all records, [N, D] and [N], by nearest centroids: a guess among K labels is worth 1 / K."""
        from sklearn.neighbors import NearestCentroid

        place = {"seed": self.seed, "workers": self.workers, "folder": self.folder}
        return data_oob(features, labels, estimator=NearestCentroid(), bags=self._count, **place)  # type: ignore[arg-type]

    @property
    def _count(self) -> int:
        return self.draws or DEFAULT_DRAWS[self.name] or 1


class CooperativeGame(Protocol):
    """A method of this package."""

    def __call__(self, part: Fold) -> Values:
        """The values of the n records, or of the G groups."""
        ...


def cross_validated_values(
    game: CooperativeGame,
    features: npt.ArrayLike,
    labels: Sequence[Any] | npt.NDArray[Any],
    fold: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64] | None = None,
) -> Values:
    """What each record, or group of records, is worth for predicting records that it does not hold.

    Each fold is held out in turn and the rest valued by it, so that no records beside the N are needed and all of them
    get a value: the mean over the folds that they are not in, each counting by its records. In a fold take part the
    labels that stand both in it and outside it, if there are at least two; a record that is alone with its label has
    no value.

    Args:
        game: the method.
        features: [N, D].
        labels: [N].
        fold: int64 [N], at least two different numbers.
        groups: int64 [N] in 0..G-1; values are of whole groups then, divided by their records.

    Returns:
        Values of the N records, or of a record of each of the G groups on average; NaN without any. Standard errors are
        over the folds (of a weighted mean, W. G. Cochran, Sampling Techniques, 1977, section 6.4), NaN for less than
        two, and made greater for what the folds share: the variance of J of them counts 1 / J + m / n times, with m
        records in a fold and n outside of it (C. Nadeau and Y. Bengio, Inference for the Generalization Error, Machine
        Learning 52, 2003).

    Raises:
        UserError: shapes do not fit, there are fewer than two folds, or no fold has two labels to tell apart.
    """
    known = check_features("features", features)
    given = check_labels("labels", labels, len(known))
    numbers = np.unique(fold)
    if len(fold) != len(known) or len(numbers) < 2:
        raise UserError(f"{len(numbers)} parts of {len(fold)} records; give each of {len(known)} one of two or more")
    players = len(known) if groups is None else int(groups.max()) + 1
    found, weights, evaluations = np.full((len(numbers), players), np.nan), np.zeros(len(numbers)), 0
    for place, number in enumerate(numbers.tolist()):
        inside = fold == number
        both = np.intersect1d(given[inside], given[~inside])
        if len(both) < 2:
            continue
        rows, asked = (np.flatnonzero(side & np.isin(given, both)) for side in (~inside, inside))
        own, among = (rows, None) if groups is None else np.unique(groups[rows], return_inverse=True)
        values = game(Fold(known[rows], given[rows], known[asked], given[asked], among))
        counts = 1 if among is None else np.bincount(among)
        found[place, own], weights[place] = values.values / counts, len(asked)
        evaluations += values.evaluations
    if not weights.any():
        raise UserError("no two labels stand with two records each, so that nothing can be held out")
    asked_of = weights[weights > 0].mean()
    return Values(*_mean_over_folds(found, weights, asked_of / (len(known) - asked_of)), evaluations)


def _mean_over_folds(found: Floats, weights: Floats, shared: float) -> tuple[Floats, Floats]:
    """Means and standard errors, float64 [P], of the numbers of each column of [F, P], NaN where a fold has none.

    ``shared`` is the part of a fold's variance that no number of folds takes away.
    """
    there = ~np.isnan(found)
    shares = np.where(there, weights[:, None], 0.0)
    total, count = shares.sum(axis=0), there.sum(axis=0)
    shares /= np.where(total > 0, total, 1)
    mean = np.where(count > 0, (shares * np.where(there, found, 0)).sum(axis=0), np.nan)
    squares = (shares * np.where(there, found - mean, 0)) ** 2
    errors = np.where(
        count > 1, np.sqrt(squares.sum(axis=0) * count / np.maximum(count - 1, 1) * (1 + shared * count)), np.nan
    )
    return mean, errors
