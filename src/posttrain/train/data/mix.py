"""Shuffled passes over the records, which mix their kinds by weight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.store.errors import UserError, suggest
from posttrain.train.data.config import MixConfig


@dataclass(frozen=True, eq=False)
class MixPart:
    """Records of one kind.

    Args:
        rows: int64 [R].
        share: records of them in each pass; a pass continues where the one before stopped, so that the uses of two
            records differ by one at most.
    """

    rows: np.ndarray
    share: int


def mix_parts(
    config: MixConfig, kinds: np.ndarray, rows: np.ndarray, where: str, passes: Callable[[int], int] | None = None
) -> list[MixPart]:
    """Return the kinds that a mix names, with their shares of a pass as long as the number of their records.

    Shares are whole numbers of records by largest remainders; the part of a kind above its cap goes to the others by
    their weights.

    Args:
        config: with a mix.
        kinds: str [records].
        rows: int64, the eligible records.
        where: config key that errors name.
        passes: number of the phase's passes, from the records of a pass; needed with ``mix_epochs``.

    Raises:
        UserError: no record is of a kind, its share of a pass is less than a record, or the caps leave too little.
    """
    known = sorted(set(kinds[rows].tolist()))
    names = known if config.mix == "sizes" else list(config.mix or {})
    groups = [rows[kinds[rows] == name] for name in names]
    for name, group in zip(names, groups, strict=True):
        if not len(group):
            raise UserError(f"no record is of `{name}`", where=where, fix=suggest(name, known))
    sizes = np.array([len(group) for group in groups], np.int64)
    limited = sizes if config.mix_limit is None else np.minimum(sizes, config.mix_limit)
    total = int(limited.sum())
    weights = np.array(list(config.mix.values()) if isinstance(config.mix, dict) else limited, np.float64)
    logs = np.log(weights) / config.mix_temperature
    caps = np.full(len(names), total if config.mix_limit is None else config.mix_limit)
    if config.mix_epochs is not None and passes is not None:
        count = passes(total)
        caps = np.minimum(caps, sizes * config.mix_epochs // count)
        if caps.sum() < total:
            raise UserError(
                f"{count} passes of {total} records meet some more than {config.mix_epochs} times",
                where=f"{where}_epochs",
                fix="raise it, or train for fewer epochs or steps",
            )
    shares = apportion(total, logs, caps)
    for name, share in zip(names, shares, strict=True):
        if share == 0:
            raise UserError(f"the share of `{name}` is less than a record", where=where, fix="raise it or leave it out")
    return [MixPart(group, share) for group, share in zip(groups, shares, strict=True)]


def apportion(total: int, logs: np.ndarray, caps: np.ndarray | None = None) -> list[int]:
    """Split ``total`` into whole numbers by weights, rounding up the largest remainders (Hamilton's method).

    Args:
        logs: float64, natural logarithms of the weights.
        caps: int64, upper bounds, which sum to ``total`` at least; the excess is split among the others by weight.
    """
    shares = np.zeros(len(logs), np.int64)
    free = np.ones(len(logs), bool)
    while free.any():
        left = total - int(shares.sum())
        # Relative to the largest weight that is still free: a weight that underflows beside a capped one may not beside
        # the rest.
        weights = np.where(free, np.exp(np.minimum(logs - logs[free].max(), 0.0)), 0.0)
        exact = weights / weights.sum() * left
        full = np.zeros(0, bool) if caps is None else free & (exact >= caps)
        if not full.any():
            whole = np.floor(exact).astype(np.int64)
            first = np.argsort(np.where(free, whole - exact, np.inf), kind="stable")
            whole[first[: left - whole.sum()]] += 1
            shares += whole
            break
        assert caps is not None
        shares[full] = caps[full]
        free &= ~full
    counts: list[int] = shares.tolist()
    return counts


class EpochPlan:
    """Plans the batches of pass after pass over some records; a function of the arguments.

    Several parts are interleaved evenly: after n of a pass's N records, a part with the share s was used n s/N times,
    give or take (1 + parts s/N) / 2.

    Args:
        parts: the records.
        batch_size: rows a batch; the last one of a pass may have fewer.
        seed: of the shuffling; None keeps the records' order.
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
        if self._current is None or self._current[0] != number:
            self._current = number, self._pass(number)
        return self._current[1][index * self._batch_size : (index + 1) * self._batch_size]

    def _pass(self, number: int) -> np.ndarray:
        drawn = [self._draw(part, kind, number) for kind, part in enumerate(self._parts)]
        if self._seed is None or len(drawn) > 1:
            return _interleave(drawn)
        return np.random.default_rng([self._seed, self._first + number]).permutation(np.concatenate(drawn))

    def _draw(self, part: MixPart, kind: int, number: int) -> np.ndarray:
        """Return the next ``share`` rows of a part, which is cycled through."""
        size = len(part.rows)
        if part.share == size and len(self._parts) == 1:
            return part.rows  # the pass is shuffled as a whole
        first, last = number * part.share, (number + 1) * part.share
        cycles = [self._shuffle(part.rows, kind, cycle) for cycle in range(first // size, -(-last // size))]
        return np.concatenate(cycles)[first % size :][: part.share]

    def _shuffle(self, rows: np.ndarray, kind: int, cycle: int) -> np.ndarray:
        if self._seed is None:
            return rows
        return np.random.default_rng([self._seed, self._first, cycle, kind, 1]).permutation(rows)


def _interleave(drawn: Sequence[np.ndarray]) -> np.ndarray:
    """Interleave the rows of several parts evenly, each in its order."""
    # The k-th of s rows stands at (k + 1/2) / s of the way, as in Webster's method of apportionment.
    positions = np.concatenate([(np.arange(len(rows)) + 0.5) / len(rows) for rows in drawn])
    return np.concatenate(drawn)[np.argsort(positions, kind="stable")]
