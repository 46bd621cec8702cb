"""Values of groups of records: groups as players, or sums of their records' values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.attribution.utility import (
    IncrementalModel,
    IncrementalUtility,
    Rows,
    Utility,
    resolve_players,
    utility_key,
)
from posttrain.attribution.values import Values
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest


def group_utility(utility: Utility, groups: Sequence[int] | npt.NDArray[Any]) -> Utility:
    """Returns the utility of sets of groups, that of all their rows; incremental if ``utility`` is.

    Args:
        utility: of sets of rows 0..N-1.
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
