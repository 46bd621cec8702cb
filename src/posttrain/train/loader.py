"""The batches of a training, packed ahead of the model."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from posttrain.models.packing import Packed, Unit, micro_batches, pack
from posttrain.train.order import Order, Place
from posttrain.train.tokens.config import LoaderConfig


@dataclass(frozen=True)
class Lengths:
    """How much one optimiser step reads.

    Args:
        sequences: tokens of each sequence.
        computed: tokens of the rows, in which what sequences share stands once.
        pairs: of a token of the rows and one that it sees, itself included.
    """

    sequences: list[int]
    computed: int
    pairs: int

    @classmethod
    def of(cls, units: Sequence[Unit], packed: Sequence[Packed]) -> Self:
        """Of a step's units and its micro-batches."""
        sequences = [len(sequence.ids) for unit in units for sequence in unit]
        return cls(sequences, sum(one.ids.shape[1] for one in packed), sum(one.pairs for one in packed))


@dataclass(frozen=True, eq=False)
class Batch:
    """One optimiser step.

    Args:
        step: its number, from 0.
        epoch: passes over the data that were finished before.
        rows: of each micro-batch, the numbers of its units.
        packed: the micro-batches, on the model's device.
        lengths: how much of it there is.
    """

    step: int
    epoch: int
    rows: list[list[int]]
    packed: list[Packed]
    lengths: Lengths


class Loader:
    """The batches of an order's steps one after another; a context manager, which stops its threads.

    The next steps are packed in threads while the model works on one: what comes does not depend on how many threads
    there are or how far ahead they are. What goes wrong in a thread is raised where the batch is asked for.

    Args:
        units: the training set.
        order: whose rows are in which step; steps that are not decided are not packed ahead.
        budget: tokens of a micro-batch at most.
        device: where the batches are wanted.
        padded: whether the model needs padded rows.
        config: threads, and steps packed ahead.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        order: Order,
        budget: int,
        *,
        device: torch.device | str = "cpu",
        padded: bool = False,
        config: LoaderConfig | None = None,
    ) -> None:
        self._units, self._order, self._device, self._padded = units, order, device, padded
        self._config = config or LoaderConfig()
        self._threads = ThreadPoolExecutor(self._config.workers, "loader") if self._config.workers else None
        self._budget = budget
        self._next = 0
        self._ahead: deque[Future[Batch]] = deque()
        self.waited = 0.0
        """Seconds that the last batch was waited for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next step's batch.

        Raises:
            StopIteration: that was the last step.
            IndexError: the next step hangs on losses that the order was not told.
        """
        start = time.perf_counter()
        if self._next >= self._order.steps:
            raise StopIteration
        self._pack_ahead()
        try:
            batch = self._ahead.popleft().result() if self._ahead else self._load(*self._work(self._next))
        except BaseException:
            self.seek(self._next)  # what is ahead is the step after it
            raise
        self._next += 1
        self._pack_ahead()
        self.waited = time.perf_counter() - start
        return batch

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch at most. A new value holds from the next batch on: none packed before comes."""
        return self._budget

    @budget.setter
    def budget(self, tokens: int) -> None:
        self.seek(self._next)
        self._budget = tokens

    def seek(self, step: int) -> None:
        """Go on with any step, earlier or later, or with the same again."""
        while self._ahead:
            self._ahead.pop().cancel()
        self._next = step

    def close(self) -> None:
        """Stop the threads; a batch that one is busy with is waited for."""
        self.seek(self._next)
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _pack_ahead(self) -> None:
        if self._threads is None:
            return
        last = min(self._next + self._config.prefetch, self._order.decided)
        for step in range(self._next + len(self._ahead), last):
            self._ahead.append(self._threads.submit(self._load, *self._work(step)))

    def _work(self, step: int) -> tuple[Place, int, list[int], int]:
        """All that a thread is told: it reads nothing that the training may change meanwhile."""
        return self._order.place(step), step, self._order.rows(step), self._budget

    def _load(self, place: Place, step: int, rows: list[int], budget: int) -> Batch:
        units = [self._units[row] for row in rows]
        parts = list(micro_batches(units, budget))
        packed = [pack(part, self._device, padded=self._padded) for part in parts]
        first, groups = 0, []
        for part in parts:
            groups.append(rows[first : first + len(part)])
            first += len(part)
        return Batch(step, place.epoch, groups, packed, Lengths.of(units, packed))
