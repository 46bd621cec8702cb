"""Passes over the records, shuffled; each has its shares of their kinds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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


class Passes:
    """Batches of pass after pass over some records; a function of the arguments.

    Args:
        parts: the records.
        batch_size: rows a batch; the last one of a pass may have fewer.
        seed: of the shuffling; None keeps the records' order. Several parts stand evenly between each other: after n of
            a pass's N records, a part with the share s was met n s/N times, give or take (1 + parts s/N) / 2.
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
        if self._seed is None or len(drawn) > 1:
            return _interleaved(drawn)
        return np.random.default_rng([self._seed, self._first + number]).permutation(np.concatenate(drawn))

    def _drawn(self, part: Part, kind: int, number: int) -> np.ndarray:
        """The next ``share`` rows of a part, which is gone through again and again."""
        size = len(part.rows)
        if part.share == size and len(self._parts) == 1:
            return part.rows  # the pass is shuffled as a whole
        first, last = number * part.share, (number + 1) * part.share
        turns = [self._turn(part.rows, kind, turn) for turn in range(first // size, -(-last // size))]
        return np.concatenate(turns)[first % size :][: part.share]

    def _turn(self, rows: np.ndarray, kind: int, turn: int) -> np.ndarray:
        if self._seed is None:
            return rows
        return np.random.default_rng([self._seed, self._first, turn, kind, 1]).permutation(rows)


def _interleaved(drawn: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of several parts evenly between each other, each in its order.

    The k-th of a part's s rows stands at (k + 1/2) / s of the way, as in Webster's method of apportionment.
    """
    places = np.concatenate([(np.arange(len(rows)) + 0.5) / len(rows) for rows in drawn])
    return np.concatenate(drawn)[np.argsort(places, kind="stable")]
