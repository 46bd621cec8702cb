"""Units as an objective wants them, made from those that every objective begins with."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import overload

import numpy as np

from posttrain.models.chat import Encoded
from posttrain.models.packing import Unit, micro_batches
from posttrain.train.order import Order
from posttrain.train.tokens.token_set import TokenSet, counted


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
        return counted(self)

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


def changed(units: Sequence[Unit], change: Callable[[Encoded], Encoded], longest: np.ndarray | None = None) -> UnitView:
    """The units with every sequence changed; ``longest`` as `UnitView` takes it."""
    return UnitView(len(units), lambda place: [change(sequence) for sequence in units[place]], longest)


def split(units: Sequence[Unit]) -> UnitView:
    """Every sequence of units of one size as a unit of its own."""
    size = len(units[0])
    lengths = units.sequence_lengths if isinstance(units, TokenSet) else None
    return UnitView(len(units) * size, lambda place: [units[place // size][place % size]], lengths)


def answer_start(sequence: Encoded) -> int:
    """Where the last answer begins: the supervised tokens that nothing follows."""
    start = len(sequence.ids)
    while start and sequence.supervised[start - 1]:
        start -= 1
    return start


def only_answer(sequence: Encoded) -> Encoded:
    """The sequence with its last answer supervised, and earlier ones only read."""
    start = answer_start(sequence)
    return Encoded(sequence.ids, [False] * start + sequence.supervised[start:])


def whole_text(sequence: Encoded) -> Encoded:
    """The sequence with every token supervised."""
    return Encoded(sequence.ids, [True] * len(sequence.ids))


def read_to_end(ids: Sequence[int], padding: int | None) -> Encoded:
    """A sequence whose state is wanted at its last token, so far as that is no padding token (as transformers has it).

    Packing gives the states of tokens that a supervised one follows, and does not read that one: so one is put behind.
    """
    end = len(ids)
    while end > 1 and ids[end - 1] == padding:
        end -= 1
    return Encoded([*ids[:end], ids[end - 1]], [False] * end + [True])


def grouped(units: Sequence[Unit], rows: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """The rows of some units, cut into micro-batches as `micro_batches` does it."""
    left = iter(rows)
    for part in micro_batches(UnitView(len(rows), lambda place: units[rows[place]]), tokens):
        yield list(islice(left, len(part)))


def first_met(units: Sequence[Unit], order: Order, tokens: int) -> Iterator[list[int]]:
    """The micro-batches of an order's steps, up to the one after which every unit was met, or none is decided."""
    waiting = set(range(len(units)))
    for step in range(order.decided):
        if not waiting:
            return
        rows = order.rows(step)
        waiting.difference_update(rows)
        yield from grouped(units, rows, tokens)


def supervised_tokens(sequence: Encoded) -> int:
    """The tokens that a loss is taken on; nothing predicts a first one."""
    return sum(sequence.supervised[1:])
