"""Frees memory, and retries a pass over units in smaller groups."""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from posttrain.models.loading import is_out_of_memory
from posttrain.models.packing import Unit
from posttrain.store.errors import WorkError
from posttrain.train.data.loader import Batch
from posttrain.train.data.units import group_by_tokens

log = logging.getLogger("posttrain")

Result = TypeVar("Result")


def empty_cache() -> None:
    """Frees memory that is not in use; call it outside of the ``except`` that holds the error's frames."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def halve_micro_batch(batch: Batch, budget: int) -> int:
    """Returns half the tokens of a step's largest micro-batch, and of the budget at most.

    Raises:
        WorkError: one example does not fit into memory.
    """
    largest = max(packed.tokens for packed in batch.packed)
    # One example cannot be cut any further, whatever the budget.
    if max(map(len, batch.rows)) == 1:
        raise WorkError(
            f"out of memory with one example of {largest} tokens at a time; "
            "set train.recompute=full, a lower train.max_length or train.method=lora"
        )
    tokens = max(1, min(budget, largest) // 2)
    log.warning(
        "out of memory at step %d: micro-batches of at most %d tokens from here on, the batch stays as it is",
        batch.step,
        tokens,
    )
    return tokens


@contextmanager
def memory_advice() -> Iterator[None]:
    """Turns an error of memory, where no smaller micro-batch would help, into one line.

    Raises:
        WorkError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise WorkError(
            "out of memory beside the passes over records, such as in the optimizer's state; "
            "set train.method=lora or train.optimizer.name=adafactor, or free memory"
        ) from error


def run_in_groups(
    units: Sequence[Unit], groups: Iterable[Sequence[int]], read: Callable[[Sequence[int]], Result]
) -> Iterator[tuple[Sequence[int], Result]]:
    """Yields each group's rows and the result of ``read``, in the groups' order.

    Where memory runs out, that group and all that follow are cut into smaller ones.

    Args:
        units: that the rows are of.
        groups: rows that are read together; the next group is taken once the one before was read.

    Raises:
        WorkError: there is no memory for one unit.
    """
    budget: int | None = None
    # One group at a time from the iterator: later groups may depend on the rows that earlier ones have read.
    for group in groups:
        remaining = list(group)
        while remaining:
            rows = remaining if budget is None else next(group_by_tokens(units, remaining, budget))
            result = _try_group(read, rows)
            if result is None:
                budget = _halve_budget(units, rows)
            else:
                remaining = remaining[len(rows) :]
                yield rows, result[0]


def _try_group(read: Callable[[Sequence[int]], Result], rows: Sequence[int]) -> tuple[Result] | None:
    """Reads a group; None if memory ran out, after freeing what the attempt had taken."""
    try:
        return (read(rows),)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    empty_cache()
    return None


def _halve_budget(units: Sequence[Unit], rows: Sequence[int]) -> int:
    """Returns half of the rows' tokens, the budget to try next."""
    tokens = sum(len(sequence.ids) for row in rows for sequence in units[row])
    if len(rows) == 1:
        raise WorkError(f"out of memory with one example of {tokens} tokens at a time; set a lower train.max_length")
    log.warning("  out of memory: at most %d tokens are read at a time from here on", tokens // 2)
    return tokens // 2
