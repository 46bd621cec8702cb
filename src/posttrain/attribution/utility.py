"""The utility protocol, its incremental form, utilities of groups, and the checked data that utilities train on."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from posttrain.attribution.values import Floats, Values
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest

Rows = npt.NDArray[np.int64]

Utility = Callable[[Rows], float]
"""Returns the score of a model trained on some rows, int64 [n] distinct in any order, n = 0 included; higher is better.

One set must always score the same. Two attributes are optional: ``players``, an integer, the number of rows, and
``key``, a string that identifies the utility's data and settings, so that work on it can resume.
"""


class IncrementalModel(Protocol):
    """A model that is trained one row at a time, starting without any."""

    def add(self, row: int) -> None:
        """Adds one row to the training set."""

    def score(self) -> float:
        """Returns the utility of the rows added so far."""


@runtime_checkable
class IncrementalUtility(Protocol):
    """A utility that updates its model with a new row for less than the cost of a training."""

    def __call__(self, rows: Rows, /) -> float: ...

    def start(self) -> IncrementalModel:
        """Returns a model of no rows."""


class _RetrainedModel:
    """Makes any utility incremental: each score trains from scratch."""

    def __init__(self, utility: Utility) -> None:
        self._utility = utility
        self._rows: list[int] = []

    def add(self, row: int) -> None:
        self._rows.append(row)

    def score(self) -> float:
        return float(self._utility(np.array(self._rows, dtype=np.int64)))


def start_model(utility: Utility) -> IncrementalModel:
    """Returns a model of no rows: the utility's own if it is incremental, else one that trains anew for each score."""
    return utility.start() if isinstance(utility, IncrementalUtility) else _RetrainedModel(utility)


def utility_key(utility: Utility) -> str:
    """Returns the utility's ``key``.

    Raises:
        UserError: it has none.
    """
    key = getattr(utility, "key", None)
    if not isinstance(key, str):
        raise UserError(
            "the utility has no `key` that identifies its data", fix="set it to a string, or give no folder"
        )
    return key


def check_positive(**numbers: int) -> None:
    """Raises a UserError if one of them is less than 1."""
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name} must be at least 1, and is {number}")


def resolve_players(utility: Utility, players: int | None) -> int:
    """Returns the number of players, the argument or the utility's ``players``.

    Raises:
        UserError: neither gives a number, it is less than 1, or the two differ.
    """
    own = getattr(utility, "players", None)
    if players is None:
        if own is None:
            raise UserError("the utility has no number of players", fix="give players")
        return int(own)
    check_positive(players=players)
    if own is not None and own != players:
        raise UserError(f"the utility has {own} players, not {players}")
    return players


def check_seed(seed: int) -> None:
    """Raises a UserError if the seed is negative."""
    if seed < 0:
        raise UserError(f"seed must not be negative, and is {seed}")


def check_finite(score: float) -> float:
    """Returns the score as a float.

    Raises:
        UserError: it is not finite.
    """
    if not np.isfinite(score):
        raise UserError(f"the utility scored {score}", fix="it must give a finite number for every set")
    return float(score)


@dataclass(frozen=True)
class LearningTask:
    """Checked features and numbered labels.

    Attributes:
        features: float64 [N, D] of the training rows.
        labels: int64 [N] in 0..K-1, in the sorted order of the labels.
        evaluation_features: float64 [M, D].
        evaluation_labels: int64 [M].
        classes: K.
    """

    features: Floats
    labels: npt.NDArray[np.int64]
    evaluation_features: Floats
    evaluation_labels: npt.NDArray[np.int64]
    classes: int

    def key(self, *settings: str | int | float | None) -> str:
        """Returns 64 hex characters that depend on the data and the settings."""
        arrays = (self.features, self.labels, self.evaluation_features, self.evaluation_labels)
        hashes = [hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for array in arrays]
        return digest([list(self.features.shape), list(self.evaluation_features.shape), hashes, list(settings)])


def learning_task(
    features: npt.ArrayLike,
    labels: Sequence[Any] | npt.NDArray[Any],
    evaluation_features: npt.ArrayLike,
    evaluation_labels: Sequence[Any] | npt.NDArray[Any],
) -> LearningTask:
    """Checks the data and encodes the labels as integers.

    Args:
        features: [N, D] of the training rows, N and D at least 1.
        labels: [N], anything that can be sorted.
        evaluation_features: [M, D], M at least 1.
        evaluation_labels: [M].

    Raises:
        UserError: shapes do not fit, a feature is not finite, or a class occurs in only one of training and evaluation.
    """
    train = check_features("features", features)
    evaluation = check_features("evaluation_features", evaluation_features)
    if train.shape[1] != evaluation.shape[1]:
        raise UserError(f"features have {train.shape[1]} columns, evaluation_features {evaluation.shape[1]}")
    train_labels = check_labels("labels", labels, len(train))
    true = check_labels("evaluation_labels", evaluation_labels, len(evaluation))
    classes, codes = np.unique(train_labels, return_inverse=True)
    evaluation_classes = np.unique(true)
    # A class on one side only: its training records could gain nothing, its evaluation records never be right.
    if len(missing := np.setdiff1d(classes, evaluation_classes)):
        raise UserError(
            f"class {missing.tolist()[0]!r} has no evaluation record",
            fix="add some, or leave its training records out: they could have no value",
        )
    if len(unknown := np.setdiff1d(evaluation_classes, classes)):
        raise UserError(f"class {unknown.tolist()[0]!r} of the evaluation has no training record")
    evaluation_codes = np.searchsorted(classes, true).astype(np.int64)
    return LearningTask(train, codes.astype(np.int64), evaluation, evaluation_codes, len(classes))


def check_features(name: str, features: npt.ArrayLike) -> Floats:
    """Returns features as float64 [N, D]; raises a UserError for any other shape, NaN or infinity."""
    values = np.ascontiguousarray(features, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise UserError(f"{name} must be rows by columns, at least one of each; the shape is {values.shape}")
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise UserError(f"{name} has a value that is not finite, first in row {row}")
    return values


def check_labels(name: str, labels: Sequence[Any] | npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Returns labels as an array [N]; raises a UserError for any other shape, NaN or infinity."""
    values = np.asarray(labels)
    if values.shape != (rows,):
        raise UserError(f"{name} must have one label for each of {rows} rows; the shape is {values.shape}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UserError(f"{name} has a value that is not finite")
    return values


def group_utility(utility: Utility, groups: Sequence[int] | npt.NDArray[Any]) -> Utility:
    """Returns the utility of sets of groups, the utility of all their rows; incremental if ``utility`` is.

    Args:
        utility: utility of sets of rows 0..N-1.
        groups: integers [N] in 0..G-1, the group of each row; each of 0..G-1 has a row.

    Raises:
        UserError: a group is not such a number.
    """
    numbers = _check_groups(groups)
    resolve_players(utility, len(numbers))
    order = np.argsort(numbers, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(numbers))[:-1])
    kind = _IncrementalGroupUtility if isinstance(utility, IncrementalUtility) else _GroupUtility
    return kind(utility, rows)


def sum_by_group(values: Values, groups: Sequence[int] | npt.NDArray[Any]) -> Values:
    """Returns the value of each group, the sum of its records' values: float64 [G].

    Standard errors are propagated as if those of the records were independent. Those of one permutation are not: their
    sum is fixed, so that the errors of large groups come out too great. `group_utility` has exact ones.

    Args:
        groups: integers [N] in 0..G-1; each of 0..G-1 has a record.

    Raises:
        UserError: the lengths differ, or a group is not such a number.
    """
    numbers = _check_groups(groups)
    if len(numbers) != len(values.values):
        raise UserError(f"{len(numbers)} groups of {len(values.values)} values; give each record its group")
    sums = np.bincount(numbers, values.values).astype(np.float64)
    squares = np.bincount(numbers, values.standard_errors**2).astype(np.float64)
    return Values(sums, np.sqrt(squares), values.evaluations)


class _GroupUtility:
    def __init__(self, utility: Utility, rows: list[Rows]) -> None:
        self.utility, self.rows = utility, rows
        self.players = len(rows)

    @property
    def key(self) -> str:
        return digest([utility_key(self.utility), [rows.tolist() for rows in self.rows]])

    def __call__(self, players: Rows) -> float:
        rows = [self.rows[player] for player in players.tolist()]
        # Sorted, as the order of rows may change a classifier's last digits and one set must always score the same.
        return self.utility(np.sort(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.int64))


class _IncrementalGroupUtility(_GroupUtility):
    def start(self) -> IncrementalModel:
        assert isinstance(self.utility, IncrementalUtility)
        return _IncrementalGroupModel(self.utility.start(), self.rows)


class _IncrementalGroupModel:
    def __init__(self, model: IncrementalModel, rows: list[Rows]) -> None:
        self._model, self._rows = model, rows

    def add(self, row: int) -> None:
        for member in self._rows[row].tolist():  # a row of this utility is a group
            self._model.add(member)

    def score(self) -> float:
        return self._model.score()


def _check_groups(groups: Sequence[int] | npt.NDArray[Any]) -> Rows:
    numbers = np.asarray(groups)
    if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu" or numbers.min() < 0:
        raise UserError("groups must be a whole number, 0 or more, for each row")
    if (np.bincount(numbers) == 0).any():
        raise UserError(f"group {int(np.flatnonzero(np.bincount(numbers) == 0)[0])} has no row", fix="leave no gap")
    return numbers.astype(np.int64)
