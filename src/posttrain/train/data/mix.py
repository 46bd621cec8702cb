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
        rows: int64 [R], which they are.
        share: how many of them are met in each pass; passes go on where the one before stopped, so that none is met
            twice more often than another.
    """

    rows: np.ndarray
    share: int


def mix_parts(
    config: MixConfig, kinds: np.ndarray, rows: np.ndarray, where: str, passes: Callable[[int], int] | None = None
) -> list[MixPart]:
    """The kinds that a mix names, with shares of a pass that is as long as there are records of them.

    Shares are whole numbers of records by largest remainders; what a cap takes from a kind goes to the others by their
    weights.

    Args:
        config: with a mix.
        kinds: str [records], what each is.
        rows: int64, the records that come into question.
        where: what errors name.
        passes: into how many passes of so many records the stage goes; needed with ``mix_epochs``.

    Raises:
        UserError: no record is of a kind, its share of a pass is less than a record, or the caps leave too little.
    """
    known = sorted(set(kinds[rows].tolist()))
    names = known if config.mix == "sizes" else list(config.mix or {})
    found = [rows[kinds[rows] == name] for name in names]
    for name, own in zip(names, found, strict=True):
        if not len(own):
            raise UserError(f"no record is of `{name}`", where=where, fix=suggest(name, known))
    sizes = np.array([len(own) for own in found], np.int64)
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
    return [MixPart(own, share) for own, share in zip(found, shares, strict=True)]


def apportion(total: int, logs: np.ndarray, caps: np.ndarray | None = None) -> list[int]:
    """``total`` in whole numbers by weights, the largest remainders rounded up (Hamilton's method).

    Args:
        logs: float64, natural logarithms of the weights, so that none is too small beside another.
        caps: int64, what no number is above; what they take off is shared among the others by weight. Together they
            are ``total`` at least.
    """
    shares = np.zeros(len(logs), np.int64)
    free = np.ones(len(logs), bool)
    while free.any():
        left = total - int(shares.sum())
        # Beside the largest of those that still get something: what vanishes beside a full one does not among others.
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
    found: list[int] = shares.tolist()
    return found


class EpochPlan:
    """Batches of pass after pass over some records; a function of the arguments.

    Args:
        parts: the records.
        batch_size: rows a batch; the last one of a pass may have fewer.
        seed: of the shuffling; None keeps the records' order. Several parts stand evenly between each other: after n of
            a pass's N records, a part with the share s was met n s/N times, give or take (1 + parts s/N) / 2.
        first: number of the first pass: those of two stages that go on from each other are shuffled differently.
    """

    def __init__(self, parts: Sequence[MixPart], batch_size: int, seed: int | None, first: int = 0) -> None:
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
            return _interleave(drawn)
        return np.random.default_rng([self._seed, self._first + number]).permutation(np.concatenate(drawn))

    def _drawn(self, part: MixPart, kind: int, number: int) -> np.ndarray:
        """The next ``ratio`` rows of a part, which is gone through again and again."""
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


def _interleave(drawn: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of several parts evenly between each other, each in its order.

    The k-th of a part's s rows stands at (k + 1/2) / s of the way, as in Webster's method of apportionment.
    """
    places = np.concatenate([(np.arange(len(rows)) + 0.5) / len(rows) for rows in drawn])
    return np.concatenate(drawn)[np.argsort(places, kind="stable")]
