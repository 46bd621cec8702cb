"""Data valuation methods by name, and cross-validated values, which need no separate evaluation records."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from posttrain.attribution.blocks import Floats, Rows
from posttrain.attribution.data_oob import data_oob
from posttrain.attribution.knn_shapley import knn_shapley
from posttrain.attribution.ridge import RidgeUtility
from posttrain.attribution.tmc_shapley import tmc_shapley
from posttrain.store.errors import UserError, suggest
from posttrain.store.hashing import digest

DATA_OOB = "data_oob"
"""The only method that holds nothing out; its values are shares of right predictions."""

_DRAWS = {"knn_shapley": 0, "tmc_shapley": 100, DATA_OOB: 400}
"""The methods, and their default number of permutations or bags; 0 if they draw nothing."""

_VERSION = 1  # raise it when the same key would stand for other numbers


@dataclass(frozen=True)
class Values:
    """The value of each training record: its contribution to the accuracy of a model that is trained on it.

    Attributes:
        values: float64 [N]; negative for a record that does harm, NaN for one without a value.
        standard_errors: float64 [N]; NaN for too few folds or draws.
    """

    values: Floats
    standard_errors: Floats


@dataclass(frozen=True)
class ValuationMethod:
    """A valuation method with its settings.

    Attributes:
        name: ``knn_shapley``, ``tmc_shapley`` of a ridge classifier, or ``data_oob`` of nearest centroids.
        draws: number of permutations or bags; the default of the method if None.
        seed: seed of the draws.
        workers: number of processes; it changes no digit.
        folder: caches finished work, so that a killed call resumes.

    Raises:
        UserError: there is no such method, or nothing to draw.
    """

    name: str
    draws: int | None = None
    seed: int = 0
    workers: int = 1
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.name not in _DRAWS:
            raise UserError(f"no method `{self.name}`; {suggest(self.name, _DRAWS)}", where="--method")
        if self.draws is not None and not _DRAWS[self.name]:
            raise UserError(f"{self.name} draws nothing at random", where="--draws", fix="leave it out")

    def shapley(self, features: Floats, labels: Rows, evaluation_features: Floats, evaluation_labels: Rows) -> Floats:
        """Returns the Shapley values [N] of records for predicting the evaluation records."""
        task = features, labels, evaluation_features, evaluation_labels
        if self.name == "knn_shapley":
            return knn_shapley(*task)
        draws, folder = self.draws or _DRAWS[self.name], self._folder(*task)
        utility = RidgeUtility(*task)
        return tmc_shapley(utility, permutations=draws, seed=self.seed, workers=self.workers, folder=folder)

    def out_of_bag(self, features: Floats, labels: Rows) -> Values:
        """Returns data-OOB of all records by nearest centroids; a guess of K labels scores 1 / K."""
        from sklearn.neighbors import NearestCentroid

        draws, folder = self.draws or _DRAWS[self.name], self._folder(features, labels)
        estimator = NearestCentroid()
        return Values(
            *data_oob(features, labels, estimator, bags=draws, seed=self.seed, workers=self.workers, folder=folder)
        )

    def _folder(self, *arrays: npt.NDArray[np.generic]) -> Path | None:
        """Returns the folder of the work on these arrays."""
        if self.folder is None:
            return None
        # The number of draws is not in the name, so that a run with more draws resumes from fewer.
        hashes = [hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for array in arrays]
        return self.folder / digest([_VERSION, self.name, self.seed, [list(array.shape) for array in arrays], hashes])


def check_features(features: npt.ArrayLike) -> Floats:
    """Returns features as float64 [N, D]; raises a UserError for NaN or infinity."""
    values = np.ascontiguousarray(features, dtype=np.float64)
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise UserError(f"an embedding has a value that is not finite, first in row {row}", where="--embedder")
    return values


def cross_validated_values(
    shapley: Callable[[Floats, Rows, Floats, Rows], Floats],
    features: Floats,
    labels: Rows,
    fold: Rows,
    groups: Rows | None = None,
) -> Values:
    """Values each record, or group of records, by how well models trained on it predict held-out records.

    Each fold is held out in turn and the rest valued by it. A record's value is the mean over the folds that it is not
    in, weighted by their records. A fold uses the labels that occur both in it and outside of it, if there are at least
    two; a record that is alone with its label has no value.

    Args:
        shapley: values the records of a fold, as `ValuationMethod.shapley` does.
        features: [N, D].
        labels: [N].
        fold: [N], at least two different numbers.
        groups: [N] in 0..G-1; Shapley values add up, so that a group's is the sum of its records', divided by their
            number.

    Returns:
        Values of the N records, or of a record of each of the G groups on average; NaN without any. Standard errors are
        over the folds (of a weighted mean, W. G. Cochran, Sampling Techniques, 1977, section 6.4), NaN for less than
        two, and made greater for what the folds share: the variance of J of them counts 1 / J + m / n times, with m
        records in a fold and n outside of it (C. Nadeau and Y. Bengio, Inference for the Generalization Error, Machine
        Learning 52, 2003).

    Raises:
        UserError: no fold has two labels to distinguish.
    """
    numbers = np.unique(fold)
    players = np.arange(len(labels)) if groups is None else groups
    # Cross-validation needs no evaluation records: a model whose training set the test records had shaped could no
    # longer be judged by them.
    by_fold, weights = np.full((len(numbers), players.max() + 1), np.nan), np.zeros(len(numbers))
    for index, number in enumerate(numbers.tolist()):
        held_out = fold == number
        # Records of a label that is only in the fold, or only outside of it, are left out: nothing could be right.
        shared = np.intersect1d(labels[held_out], labels[~held_out])
        if len(shared) < 2:
            continue
        train, test = (np.flatnonzero(side & np.isin(labels, shared)) for side in (~held_out, held_out))
        values = shapley(features[train], labels[train], features[test], labels[test])
        own, members = np.unique(players[train], return_inverse=True)
        by_fold[index, own] = np.bincount(members, values) / np.bincount(members)
        weights[index] = len(test)
    if not weights.any():
        raise UserError("no two labels have two records each, so nothing can be held out")
    fold_size = weights[weights > 0].mean()
    return Values(*_mean_over_folds(by_fold, weights, fold_size / (len(labels) - fold_size)))


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
