"""Passes over the records, shuffled, and the shares that kinds of records have in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean


@dataclass(frozen=True, eq=False)
class Part:
    """Records of one kind.

    Args:
        rows: int64 [R], which they are.
        share: how many of them are met in each pass; passes go on where the one before stopped, so that none is met
            twice more often than another.
    """

    rows: np.ndarray
    share: int


def parts_of(mix: dict[str, float], kinds: np.ndarray, rows: np.ndarray, where: str) -> list[Part]:
    """The kinds that a mix names, with shares of a pass that is as long as there are records of them.

    Args:
        mix: weight of each kind, above 0.
        kinds: str [records], what each is.
        rows: int64, the records that come into question.
        where: what errors name.

    Raises:
        UserError: no record is of a kind, or its share of a pass is less than a record.
    """
    found = [rows[kinds[rows] == name] for name in mix]
    for name, own in zip(mix, found, strict=True):
        if not len(own):
            known = sorted(set(kinds[rows].tolist()))
            raise UserError(f"no record is of `{name}`", where=where, fix=did_you_mean(name, known))
    shares = apportioned(sum(map(len, found)), np.array(list(mix.values())))
    for name, share in zip(mix, shares, strict=True):
        if share == 0:
            raise UserError(f"the share of `{name}` is less than a record", where=where, fix="raise it or leave it out")
    return [Part(own, share) for own, share in zip(found, shares, strict=True)]


def apportioned(total: int, weights: np.ndarray) -> list[int]:
    """``total`` in whole numbers by weights, the largest remainders rounded up (Hamilton's method)."""
    exact = weights / weights.sum() * total
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - whole.sum()]] += 1
    found: list[int] = whole.tolist()
    return found


class Passes:
    """Batches of pass after pass over some records; a function of the arguments.

    Args:
        parts: the records.
        batch_size: rows a batch; the last one of a pass may have fewer.
        seed: of the shuffling; None keeps the records' order, with the parts evenly between each other.
        first: number of the first pass: those of two stages that go on from each other are shuffled differently.
    """

    def __init__(self, parts: Sequence[Part], batch_size: int, seed: int | None, first: int = 0) -> None:
        self._parts, self._batch_size, self._seed, self._first = parts, batch_size, seed, first
        self.batches = -(-sum(part.share for part in parts) // batch_size)
        """Batches a pass."""
        self._held: tuple[int, np.ndarray] | None = None

    def rows(self, batch: int) -> np.ndarray:
        """int64 [at most batch size]: a batch, counted from 0 through all passes."""
        number, place = divmod(batch, self.batches)
        if self._held is None or self._held[0] != number:
            self._held = number, self._pass(number)
        return self._held[1][place * self._batch_size : (place + 1) * self._batch_size]

    def _pass(self, number: int) -> np.ndarray:
        drawn = [self._drawn(part, kind, number) for kind, part in enumerate(self._parts)]
        if self._seed is None:
            return _interleaved(drawn)
        return np.random.default_rng([self._seed, self._first + number]).permutation(np.concatenate(drawn))

    def _drawn(self, part: Part, kind: int, number: int) -> np.ndarray:
        """The next ``share`` rows of a part, which is gone through again and again."""
        size = len(part.rows)
        if part.share == size:
            return part.rows
        first, last = number * part.share, (number + 1) * part.share
        turns = [self._turn(part.rows, kind, turn) for turn in range(first // size, -(-last // size))]
        return np.concatenate(turns)[first % size :][: part.share]

    def _turn(self, rows: np.ndarray, kind: int, turn: int) -> np.ndarray:
        if self._seed is None:
            return rows
        return np.random.default_rng([self._seed, self._first, turn, kind, 1]).permutation(rows)


def _interleaved(drawn: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of several parts evenly between each other, each in its order."""
    places = np.concatenate([(np.arange(len(rows)) + 0.5) / len(rows) for rows in drawn])
    return np.concatenate(drawn)[np.argsort(places, kind="stable")]
