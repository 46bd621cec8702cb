"""Training units (the token sequences of one record): views, transformations and groups."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import overload

import numpy as np

from posttrain.models.chat import TokenizedExample
from posttrain.models.packing import Unit, micro_batches
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.token_set import TokenSet, count_longest


class UnitView(Sequence[Unit]):
    """So many units, each made when it is asked for, so that no token is held twice.

    Args:
        length: how many.
        make: a unit by its place.
        longest: int64 [length], tokens of each unit's longest sequence; without it they are counted when asked for.
    """

    def __init__(self, length: int, make: Callable[[int], Unit], longest: np.ndarray | None = None) -> None:
        self._length, self._make = length, make
        if longest is not None:
            self.longest = longest

    @cached_property
    def longest(self) -> np.ndarray:
        """int64 [length]: tokens of each unit's longest sequence."""
        return count_longest(self)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Unit: ...
    @overload
    def __getitem__(self, place: slice) -> list[Unit]: ...
    def __getitem__(self, place: int | slice) -> Unit | list[Unit]:
        if isinstance(place, slice):
            return [self._make(one) for one in range(*place.indices(self._length))]
        return self._make(range(self._length)[place])


def map_sequences(
    units: Sequence[Unit], change: Callable[[TokenizedExample], TokenizedExample], longest: np.ndarray | None = None
) -> UnitView:
    """The units with every sequence changed; ``longest`` as `UnitView` takes it."""
    return UnitView(len(units), lambda place: [change(sequence) for sequence in units[place]], longest)


def split_units(units: Sequence[Unit]) -> UnitView:
    """Every sequence of units of one size as a unit of its own."""
    size = len(units[0])
    lengths = units.sequence_lengths if isinstance(units, TokenSet) else None
    return UnitView(len(units) * size, lambda place: [units[place // size][place % size]], lengths)


def answer_start(sequence: TokenizedExample) -> int:
    """Where the last answer begins: the supervised tokens that nothing follows."""
    start = len(sequence.ids)
    while start and sequence.supervised[start - 1]:
        start -= 1
    return start


def only_answer(sequence: TokenizedExample) -> TokenizedExample:
    """The sequence with its last answer supervised, and earlier ones only read."""
    start = answer_start(sequence)
    return TokenizedExample(sequence.ids, [False] * start + sequence.supervised[start:])


def whole_text(sequence: TokenizedExample) -> TokenizedExample:
    """The sequence with every token supervised."""
    return TokenizedExample(sequence.ids, [True] * len(sequence.ids))


def read_to_last_token(ids: Sequence[int], padding: int | None) -> TokenizedExample:
    """A sequence whose state is wanted at its last token, so far as that is no padding token (as transformers has it).

    Packing gives the states of tokens that a supervised one follows, and does not read that one: so one is put behind.
    """
    end = len(ids)
    while end > 1 and ids[end - 1] == padding:
        end -= 1
    return TokenizedExample([*ids[:end], ids[end - 1]], [False] * end + [True])


def group_by_tokens(units: Sequence[Unit], rows: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """The rows of some units, cut into micro-batches as `micro_batches` does it."""
    left = iter(rows)
    for part in micro_batches(UnitView(len(rows), lambda place: units[rows[place]]), tokens):
        yield list(islice(left, len(part)))


def first_pass_groups(units: Sequence[Unit], order: BatchSampler, tokens: int) -> Iterator[list[int]]:
    """The micro-batches of an order's steps, up to the one after which every unit was met, or none is decided."""
    waiting = set(range(len(units)))
    for step in range(order.decided):
        if not waiting:
            return
        rows = order.rows(step)
        waiting.difference_update(rows)
        yield from group_by_tokens(units, rows, tokens)


def count_supervised(sequence: TokenizedExample) -> int:
    """The tokens that a loss is taken on; nothing predicts a first one."""
    return sum(sequence.supervised[1:])


def tokens_digest(units: Sequence[Unit]) -> str:
    """SHA-256 of the units' tokens and of which are supervised."""
    found = hashlib.sha256()
    for unit in units:
        for sequence in unit:
            found.update(np.array([len(unit), len(sequence.ids), *sequence.ids], np.int64).tobytes())
            found.update(bytes(sequence.supervised))
    return found.hexdigest()
