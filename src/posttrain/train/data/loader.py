"""Loads the batches of each optimiser step ahead of the model, for one of several processes."""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, Self

import numpy as np
import torch

from posttrain.models.packing import Packed, Unit, micro_batches, packs
from posttrain.parallel.mesh import Mesh
from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import LoaderConfig
from posttrain.train.data.rank_partition import RankPartition
from posttrain.train.data.token_set import unit_lengths
from posttrain.train.data.units import group_by_task


@dataclass(frozen=True)
class BatchLengths:
    """The amount of work of one optimiser step.

    Args:
        sequences: tokens of each sequence.
        computed: tokens of the rows, in which sequences share a common prompt.
        pairs: pairs of a token and one that it attends to, itself included.
    """

    sequences: list[int]
    computed: int
    pairs: int

    @classmethod
    def from_packed(cls, units: Sequence[Unit], packed: Sequence[Packed]) -> Self:
        """Measures a step's units and micro-batches."""
        sequences = [len(sequence.ids) for unit in units for sequence in unit]
        return cls(sequences, sum(batch.ids.shape[1] for batch in packed), sum(batch.pairs for batch in packed))


@dataclass(frozen=True, eq=False)
class Batch:
    """The batch of one optimiser step.

    Args:
        step: its number, from 0.
        epoch: finished passes over the data.
        rows: rows of each micro-batch's units.
        packed: the micro-batches, on the model's device.
        lengths: the amount of work.
        tasks: task of each micro-batch, in rising order; all 0 without tasks.
        changes_data: whether it begins a phase, or has many records that a curriculum has just opened.
        rate: megabytes of token ids that were read and packed a second, by one thread.
    """

    step: int
    epoch: int
    rows: list[list[int]]
    packed: list[Packed]
    lengths: BatchLengths
    tasks: list[int]
    changes_data: bool = False
    rate: float = 0.0


class BatchSource(Protocol):
    """The batches of a training, which may appear while it trains."""

    budget: int
    """Largest number of tokens of a micro-batch; a new value holds for batches that are made from then on."""
    waited: float
    """Seconds that the trainer waited for the last batch."""

    def next(self, step: int) -> Batch:
        """Returns the batch of a step: the step after the last one, or after a retry or a rollback any other."""


class BatchLoader:
    """Loads the batches of a training set that is known before, packed into micro-batches on the model's device.

    It makes them in threads, some steps ahead; a context manager, which stops the threads. Batches do not depend on the
    number of threads or the prefetched steps. An error in a thread is raised when its step is requested. Each process
    gets a part of every step's samples, in the sampler's order; together they get those that a single one would.

    Args:
        units: the training set.
        sampler: sampler of the rows of each step; undecided steps are not prefetched.
        budget: largest number of tokens of a micro-batch.
        device: device of the batches.
        padded: whether the model needs padded rows.
        tasks: int64 [units], each unit's task; no micro-batch holds units of two tasks. None: all are of one.
        config: threads and prefetching.
        mesh: the processes of the training.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        sampler: BatchSampler,
        budget: int,
        *,
        device: torch.device | str = "cpu",
        padded: bool = False,
        tasks: np.ndarray | None = None,
        config: LoaderConfig | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._units, self._sampler, self.budget = units, sampler, budget
        self._device, self._padded, self._tasks = device, padded, tasks
        self._config, self._mesh = config or LoaderConfig(), mesh or Mesh.single()
        # Threads, not processes: packing is NumPy, which releases the interpreter's lock, and nothing has to be
        # pickled.
        self._threads = ThreadPoolExecutor(self._config.workers, "loader") if self._config.workers else None
        self._next = 0
        self._prefetched: deque[Future[Batch]] = deque()
        # A single process takes everything, and need not read the lengths of millions of units.
        self._partition = (
            RankPartition(sampler, unit_lengths(units), self._mesh.world_size) if self._mesh.world_size > 1 else None
        )
        self.waited = 0.0

    def next(self, step: int) -> Batch:
        """Returns the batch of a step.

        Raises:
            IndexError: there is no such step, or it depends on losses that the sampler has not observed.
        """
        start = time.perf_counter()
        if step != self._next:
            self._drop_prefetched()
            self._next = step
        self._prefetch()
        try:
            batch = self._prefetched.popleft().result() if self._prefetched else self._make(*self._work(step))
        except BaseException:
            self._drop_prefetched()  # what is prefetched follows the failed step, which is requested again
            raise
        self._next += 1
        self._prefetch()
        self.waited = time.perf_counter() - start
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Stops the threads, once they have finished the step at hand."""
        self._drop_prefetched()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _drop_prefetched(self) -> None:
        while self._prefetched:
            self._prefetched.pop().cancel()

    def _prefetch(self) -> None:
        if self._threads is None:
            return
        # Undecided steps wait for losses, so they cannot be prefetched.
        last = min(self._next + self._config.prefetch, self._sampler.decided)
        for step in range(self._next + len(self._prefetched), last):
            self._prefetched.append(self._threads.submit(self._make, *self._work(step)))

    def _work(self, step: int) -> tuple[int, int, list[int], int, bool]:
        """Collects the arguments of a thread: the sampler itself changes with each observed loss."""
        rows = self._sampler.rows(step)
        if self._partition is not None:
            own = np.flatnonzero(self._partition.ranks(step) == self._mesh.rank)
            rows = [rows[index] for index in own.tolist()]
        return step, self._sampler.position(step).epoch, rows, self.budget, self._sampler.changes_data(step)

    def _make(self, step: int, epoch: int, rows: list[int], budget: int, changes_data: bool) -> Batch:
        """Makes a step's batch, perhaps in a thread: it reads nothing that the training changes."""
        start = time.perf_counter()
        by_task = group_by_task(rows, self._tasks)
        rows = [rows[index] for _, group in by_task for index in group]
        # A token set copies all units of a step at once; other sequences are read one by one.
        take = getattr(self._units, "take", None)
        units = take(rows).views() if take else [self._units[row] for row in rows]
        parts: list[list[Unit]] = []
        tasks: list[int] = []
        first = 0
        for task, group in by_task:
            parts += micro_batches(units[first : first + len(group)], budget)
            tasks += [task] * (len(parts) - len(tasks))
            first += len(group)
        # A process may have none of a small step.
        packed = packs(parts, self._device, padded=self._padded) if parts else []
        remaining = iter(rows)
        groups = [list(islice(remaining, len(part))) for part in parts]
        lengths = BatchLengths.from_packed(units, packed)
        rate = sum(batch.ids.nbytes for batch in packed) / 1e6 / (time.perf_counter() - start)
        return Batch(step, epoch, groups, packed, lengths, tasks, changes_data, rate)
