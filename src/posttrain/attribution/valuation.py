"""Data valuation methods by name, and cross-validated values, which need no separate evaluation records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from posttrain.attribution import (
    CentroidUtility,
    KNNUtility,
    RidgeUtility,
    banzhaf,
    beta_shapley,
    data_oob,
    knn_shapley,
    leave_one_out,
    tmc_shapley,
)
from posttrain.attribution.utility import Rows, Utility, check_features, check_labels, group_utility, sum_by_group
from posttrain.attribution.values import Floats, Values
from posttrain.store.errors import UserError, suggest

LEARNERS: Mapping[str, Callable[..., Utility]] = {
    "neighbours": KNNUtility,
    "centroids": CentroidUtility,
    "ridge": RidgeUtility,
}
"""The models whose utility a game is played for, by name."""

DATA_OOB = "data_oob"
"""The only method that holds nothing out; its values are shares of right predictions."""


@dataclass(frozen=True)
class _MethodSpec:
    """A valuation method.

    Attributes:
        function: computes the values.
        draws_argument: its argument with the number of random draws: permutations, sets or bags; None if it is exact.
        draws: their default number.
        own_learner: it is defined for a learner of its own.
    """

    function: Callable[..., Values]
    draws_argument: str | None = None
    draws: int = 0
    own_learner: bool = False


_METHODS = {
    "knn_shapley": _MethodSpec(knn_shapley, own_learner=True),
    "tmc_shapley": _MethodSpec(tmc_shapley, "permutations", 100),
    "beta_shapley": _MethodSpec(beta_shapley, "permutations", 100),
    "banzhaf": _MethodSpec(banzhaf, "samples", 2000),
    "leave_one_out": _MethodSpec(leave_one_out),
    DATA_OOB: _MethodSpec(data_oob, "bags", 400, own_learner=True),
}


@dataclass(frozen=True)
class Fold:
    """A cross-validation fold: records to value, and held-out records that they are valued by.

    Attributes:
        features: float64 [n, D] of the records to value.
        labels: [n].
        evaluation_features: float64 [m, D] of the held-out records.
        evaluation_labels: [m], the same set of classes as ``labels``.
        groups: int64 [n] in 0..G-1, each with a record, if groups are the players; else None.
    """

    features: Floats
    labels: npt.NDArray[Any]
    evaluation_features: Floats
    evaluation_labels: npt.NDArray[Any]
    groups: Rows | None


@dataclass(frozen=True)
class ValuationMethod:
    """A valuation method with its settings; a `CooperativeGame`.

    Attributes:
        name: name of the method, such as knn_shapley.
        learner: one of `LEARNERS`, for the methods that play a game with it; neighbours if None.
        draws: number of random draws; the default of the method if None.
        seed: seed of the draws.
        workers: number of processes; it changes no digit.
        folder: caches finished work, so that a killed call resumes.

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
        if self.name not in _METHODS:
            raise UserError(f"no method `{self.name}`; {suggest(self.name, _METHODS)}", where="--method")
        method = _METHODS[self.name]
        if self.learner is not None and method.own_learner:
            raise UserError(f"{self.name} has its own learner", where="--learner", fix="leave it out")
        if self.learner is not None and self.learner not in LEARNERS:
            raise UserError(f"no learner `{self.learner}`; {suggest(self.learner, LEARNERS)}", where="--learner")
        if self.draws is not None and method.draws_argument is None:
            raise UserError(f"{self.name} draws nothing at random", where="--draws", fix="leave it out")

    def __call__(self, fold: Fold) -> Values:
        """Returns the values of a fold's records or groups."""
        task = (fold.features, fold.labels, fold.evaluation_features, fold.evaluation_labels)
        if self.name == "knn_shapley":
            values = knn_shapley(*task)
            # The closed form knows no groups as players, but Shapley values of records add up.
            return values if fold.groups is None else sum_by_group(values, fold.groups)
        utility = LEARNERS[self.learner or "neighbours"](*task)
        if fold.groups is not None:
            utility = group_utility(utility, fold.groups)
        return _METHODS[self.name].function(utility, **self._options())

    def out_of_bag(self, features: np.ndarray, labels: list[str]) -> Values:
        """Computes data-OOB of all records, [N, D] and [N], by nearest centroids; a guess of K labels scores 1 / K."""
        from sklearn.neighbors import NearestCentroid

        return data_oob(features, labels, estimator=NearestCentroid(), **self._options())

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"workers": self.workers, "folder": self.folder}
        method = _METHODS[self.name]
        if method.draws_argument is not None:
            options |= {"seed": self.seed, method.draws_argument: self.draws or method.draws}
        return options


class CooperativeGame(Protocol):
    """A method that values the records of a fold."""

    def __call__(self, fold: Fold) -> Values:
        """Returns the values of the n records, or of the G groups."""
        ...


def cross_validated_values(
    game: CooperativeGame,
    features: npt.ArrayLike,
    labels: Sequence[Any] | npt.NDArray[Any],
    fold: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64] | None = None,
) -> Values:
    """Values each record, or group of records, by how well models trained on it predict held-out records.

    Each fold is held out in turn and the rest valued by it. A record's value is the mean over the folds that it is not
    in, weighted by their records. A fold uses the labels that occur both in it and outside of it, if there are at least
    two; a record that is alone with its label has no value.

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
        UserError: shapes do not fit, there are fewer than two folds, or no fold has two labels to distinguish.
    """
    points = check_features("features", features)
    classes = check_labels("labels", labels, len(points))
    numbers = np.unique(fold)
    if len(fold) != len(points) or len(numbers) < 2:
        raise UserError(f"{len(numbers)} folds of {len(fold)} records; give each of {len(points)} one of two or more")
    players = len(points) if groups is None else int(groups.max()) + 1
    # Cross-validation needs no evaluation records: a model whose training set the test records had shaped could no
    # longer be judged by them.
    by_fold, weights, evaluations = np.full((len(numbers), players), np.nan), np.zeros(len(numbers)), 0
    for index, number in enumerate(numbers.tolist()):
        held_out = fold == number
        # A utility refuses a class that stands on one side only, so such records sit this fold out.
        shared = np.intersect1d(classes[held_out], classes[~held_out])
        if len(shared) < 2:
            continue
        train = np.flatnonzero(~held_out & np.isin(classes, shared))
        test = np.flatnonzero(held_out & np.isin(classes, shared))
        own, members = (train, None) if groups is None else np.unique(groups[train], return_inverse=True)
        values = game(Fold(points[train], classes[train], points[test], classes[test], members))
        counts = 1 if members is None else np.bincount(members)
        by_fold[index, own], weights[index] = values.values / counts, len(test)
        evaluations += values.evaluations
    if not weights.any():
        raise UserError("no two labels have two records each, so nothing can be held out")
    fold_size = weights[weights > 0].mean()
    return Values(*_mean_over_folds(by_fold, weights, fold_size / (len(points) - fold_size)), evaluations)


def _mean_over_folds(by_fold: Floats, weights: Floats, test_to_train: float) -> tuple[Floats, Floats]:
    """Returns weighted means and standard errors, float64 [P], over the folds of [F, P]; NaN is a missing value.

    Args:
        test_to_train: records of a fold by those outside of it.
    """
    valid = ~np.isnan(by_fold)
    shares = np.where(valid, weights[:, None], 0.0)
    total, count = shares.sum(axis=0), valid.sum(axis=0)
    shares /= np.where(total > 0, total, 1)
    mean = np.where(count > 0, (shares * np.where(valid, by_fold, 0)).sum(axis=0), np.nan)
    squares = (shares * np.where(valid, by_fold - mean, 0)) ** 2
    # Folds share training records, so their values are correlated: Nadeau and Bengio's correction adds test / train to
    # the 1 / J of the variance, which no number of folds takes away.
    variance = squares.sum(axis=0) * count / np.maximum(count - 1, 1) * (1 + test_to_train * count)
    return mean, np.where(count > 1, np.sqrt(variance), np.nan)
