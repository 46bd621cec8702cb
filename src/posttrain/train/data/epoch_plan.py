"""Plans the order of records in pass after pass, those of several kinds interleaved evenly."""

from collections.abc import Sequence

import numpy as np

from posttrain.train.data.mix import MixPart


class EpochPlan:
    """Plans the batches of pass after pass over some records; a function of the arguments.

    Several parts are interleaved evenly: after n of a pass's N records, a part with the share s was used n s/N times,
    give or take (1 + parts s/N) / 2.

    Args:
        parts: the records.
        batch_size: rows per batch; the last one of a pass may have fewer.
        seed: seed of the shuffling; None keeps the records' order.
        first: number of the first pass: successive phases are shuffled differently.
    """

    def __init__(self, parts: Sequence[MixPart], batch_size: int, seed: int | None, first: int = 0) -> None:
        self._parts, self._batch_size, self._seed, self._first = parts, batch_size, seed, first
        self.batches = -(-sum(part.share for part in parts) // batch_size)
        """Batches a pass."""
        self._current: tuple[int, np.ndarray] | None = None

    def rows(self, batch: int) -> np.ndarray:
        """int64 [at most batch size]: a batch, counted from 0 through all passes."""
        number, index = divmod(batch, self.batches)
        # One permutation is kept: steps come in order, and any other can be drawn again from the seed.
        if self._current is None or self._current[0] != number:
            self._current = number, self._pass(number)
        return self._current[1][index * self._batch_size : (index + 1) * self._batch_size]

    def _pass(self, number: int) -> np.ndarray:
        parts = [self._draw(part, kind, number) for kind, part in enumerate(self._parts)]
        # Parts are shuffled each by itself, and a common shuffle would undo their even spread.
        if self._seed is None or len(parts) > 1:
            return _interleave(parts)
        return np.random.default_rng([self._seed, self._first + number]).permutation(np.concatenate(parts))

    def _draw(self, part: MixPart, kind: int, number: int) -> np.ndarray:
        """Returns the next ``share`` rows of a part, which is cycled through."""
        size = len(part.rows)
        if part.share == size and len(self._parts) == 1:
            return part.rows  # the pass is shuffled as a whole
        # A pass continues in the cycle where the last one stopped, so that no record is met twice before all are once.
        first, last = number * part.share, (number + 1) * part.share
        # Most passes touch one cycle or two; each is a function of its number, hence no state to keep.
        cycles = [self._shuffle(part.rows, kind, cycle) for cycle in range(first // size, -(-last // size))]
        return np.concatenate(cycles)[first % size :][: part.share]

    def _shuffle(self, rows: np.ndarray, kind: int, cycle: int) -> np.ndarray:
        if self._seed is None:
            return rows
        return np.random.default_rng([self._seed, self._first, cycle, kind, 1]).permutation(rows)


def _interleave(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Interleaves the rows of several parts evenly, each in its order."""
    # The k-th of s rows stands at (k + 1/2) / s of the way, as in Webster's method of apportionment.
    positions = np.concatenate([(np.arange(len(rows)) + 0.5) / len(rows) for rows in parts])
    # A stable sort keeps ties in the order of the parts on every platform.
    return np.concatenate(parts)[np.argsort(positions, kind="stable")]
