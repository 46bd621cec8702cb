"""A pass over units that nothing is learned of, in smaller groups where memory runs out."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from posttrain.models.packing import Unit
from posttrain.store.errors import WorkError
from posttrain.train.lessons.units import grouped
from posttrain.train.out_of_memory import give_back, is_out_of_memory

log = logging.getLogger("posttrain")

Found = TypeVar("Found")


def in_groups(
    units: Sequence[Unit], groups: Iterable[Sequence[int]], read: Callable[[Sequence[int]], Found]
) -> Iterator[tuple[Sequence[int], Found]]:
    """Each group's rows and what ``read`` gives of them, in the groups' order.

    Where memory runs out, that group and all that follow are cut into smaller ones.

    Args:
        units: that the rows are of.
        groups: rows that are read together; each is asked for when those before it were taken.

    Raises:
        WorkError: there is no memory for one unit.
    """
    budget: int | None = None
    for group in groups:
        left = list(group)
        while left:
            rows = left if budget is None else next(grouped(units, left, budget))
            found = _tried(read, rows)
            if found is None:
                budget = _smaller(units, rows)
            else:
                left = left[len(rows) :]
                yield rows, found[0]


def _tried(read: Callable[[Sequence[int]], Found], rows: Sequence[int]) -> tuple[Found] | None:
    """What it gives; None where memory ran out, and what it had taken is given back."""
    try:
        return (read(rows),)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    give_back()
    return None


def _smaller(units: Sequence[Unit], rows: Sequence[int]) -> int:
    """Half of the rows' tokens."""
    tokens = sum(len(sequence.ids) for row in rows for sequence in units[row])
    if len(rows) == 1:
        raise WorkError(f"out of memory with one example of {tokens} tokens at a time; set a lower train.max_length")
    log.warning("  out of memory: at most %d tokens are read at a time from here on", tokens // 2)
    return tokens // 2
