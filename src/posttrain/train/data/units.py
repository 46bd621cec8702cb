"""Training units (the token sequences of one record): views, transformations and groups."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice

import numpy as np

from posttrain.models.chat import TokenizedExample
from posttrain.models.packing import Unit, micro_batches
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.token_set import TokenSet, Units, count_longest


class UnitView(Units):
    """A sequence of units that are made on access, so that no token is held twice.

    Args:
        length: number of units.
        make: makes the unit of a row.
        longest: int64 [length], tokens of each unit's longest sequence; None: counted on access.
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

    def unit(self, row: int) -> Unit:
        """Makes the unit of a row."""
        return self._make(row)


def map_sequences(
    units: Sequence[Unit], change: Callable[[TokenizedExample], TokenizedExample], longest: np.ndarray | None = None
) -> UnitView:
    """Changes every sequence of the units; ``longest`` as in `UnitView`."""
    return UnitView(len(units), lambda row: [change(sequence) for sequence in units[row]], longest)


def split_units(units: Sequence[Unit]) -> UnitView:
    """Makes each sequence a unit of its own; all units have as many sequences."""
    # A view: the tokens of a pair are not copied to become two units.
    size = len(units[0])
    lengths = units.sequence_lengths if isinstance(units, TokenSet) else None
    return UnitView(len(units) * size, lambda row: [units[row // size][row % size]], lengths)


def answer_start(sequence: TokenizedExample) -> int:
    """Returns the index of the last answer's first token: the supervised tokens at the end."""
    start = len(sequence.ids)
    # From the end, as in a chat of several turns earlier answers may be supervised, too.
    while start and sequence.supervised[start - 1]:
        start -= 1
    return start


def only_answer(sequence: TokenizedExample) -> TokenizedExample:
    """Supervises the last answer only."""
    start = answer_start(sequence)
    return TokenizedExample(sequence.ids, [False] * start + sequence.supervised[start:])


def whole_text(sequence: TokenizedExample) -> TokenizedExample:
    """Supervises every token."""
    return TokenizedExample(sequence.ids, [True] * len(sequence.ids))


def read_to_last_token(ids: Sequence[int], padding: int | None) -> TokenizedExample:
    """Supervises one token behind the last one that is not padding (as in transformers), to read the model there."""
    # Packing returns the states that predict a supervised token, and does not read that token itself.
    end = len(ids)
    while end > 1 and ids[end - 1] == padding:
        end -= 1
    return TokenizedExample([*ids[:end], ids[end - 1]], [False] * end + [True])


def group_by_tokens(units: Sequence[Unit], rows: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Cuts rows of units into micro-batches, as `micro_batches` does."""
    remaining = iter(rows)
    for part in micro_batches(UnitView(len(rows), lambda index: units[rows[index]]), tokens):
        yield list(islice(remaining, len(part)))


def group_by_task(rows: Sequence[int], tasks: np.ndarray | None) -> list[tuple[int, list[int]]]:
    """Returns each task of a step, with the places in ``rows`` of its units; all of task 0 if there are no tasks.

    Args:
        rows: the step's.
        tasks: int64 [units], each unit's task; no micro-batch holds units of two tasks.
    """
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(0 if tasks is None else int(tasks[row]), []).append(place)
    return sorted(groups.items())


def first_pass_groups(
    units: Sequence[Unit], sampler: BatchSampler, tokens: int, tasks: np.ndarray | None = None
) -> Iterator[list[int]]:
    """Yields the micro-batches of the first steps, until every unit was read or no further step is decided.

    ``tasks`` as in `group_by_task`.
    """
    # Under a curriculum a unit may first be read many steps in.
    waiting = set(range(len(units)))
    for step in range(sampler.decided):
        if not waiting:
            return
        rows = sampler.rows(step)
        waiting.difference_update(rows)
        for _, places in group_by_task(rows, tasks):
            yield from group_by_tokens(units, [rows[place] for place in places], tokens)


def tokens_digest(units: Sequence[Unit]) -> str:
    """SHA-256 of the units' tokens and supervision."""
    sha256 = hashlib.sha256()
    for unit in units:
        for sequence in unit:
            # Lengths first, so that no two sets of units concatenate to the same bytes.
            sha256.update(np.array([len(unit), len(sequence.ids), *sequence.ids], np.int64).tobytes())
            sha256.update(bytes(sequence.supervised))
    return sha256.hexdigest()
