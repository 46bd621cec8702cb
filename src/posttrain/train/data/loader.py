"""Loads the batches of each optimiser step ahead of the model, for one of several processes."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

import numpy as np
import torch

from posttrain.models.packing import Packed, Unit, micro_batches, packs
from posttrain.store.errors import UserError
from posttrain.train.data.batch_sampler import BatchSampler, StepPosition
from posttrain.train.data.config import LoaderConfig
from posttrain.train.data.rank_partition import RankPartition
from posttrain.train.data.token_set import unit_lengths
from posttrain.train.data.units import group_by_task

Source = TypeVar("Source", bound=Sequence[Unit])

Item = TypeVar("Item")


class LoaderOptions(TypedDict, total=False):
    """Options of every loader.

    Args:
        config: threads and prefetching.
        rank: number of this process, from 0.
        world_size: number of processes.
    """

    config: LoaderConfig | None
    rank: int
    world_size: int


class DataLoader(ABC, Generic[Source, Item]):
    """Loads one item a step, prefetching in threads; a context manager, which stops them.

    `BatchLoader` loads the batches of our trainer, `RowLoader` packed rows for other ones; both share threads, ranks
    and resuming. Items do not depend on the number of threads or the prefetched steps. An error in a thread is raised
    when its step is requested.

    Of several processes with the same arguments but ``rank``, each gets a part of every step's samples, in the
    sampler's order; together they get the samples that a single one would.

    Args:
        units: the training set.
        sampler: sampler of the rows of each step; undecided steps are not prefetched.
        budget: largest number of tokens of a micro-batch, or a row.
        config: threads and prefetching.
        rank: number of this process, from 0.
        world_size: number of processes.
    """

    def __init__(
        self,
        units: Source,
        sampler: BatchSampler,
        budget: int,
        *,
        config: LoaderConfig | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not below the world size {world_size}")
        self._units, self._sampler, self._budget, self.rank = units, sampler, budget, rank
        self._config = config or LoaderConfig()
        # Threads, not processes: packing is NumPy, which releases the interpreter's lock, and nothing has to be
        # pickled.
        self._threads = ThreadPoolExecutor(self._config.workers, "loader") if self._config.workers else None
        self._next, self._used = 0, (0, 0)  # a step, and its samples that were used before
        self._prefetched: deque[Future[Item]] = deque()
        self._ranks = self._partition(world_size, (0, 0))
        self.waited = 0.0
        """Seconds that the trainer waited for the last step."""

    @abstractmethod
    def _make_item(self, position: StepPosition, step: int, rows: list[int], budget: int) -> Item:
        """Makes a step's item, perhaps in a thread: it must read nothing that the training changes."""

    @property
    def budget(self) -> int:
        """Largest number of tokens of a micro-batch or a row; a new value holds from the next step on."""
        return self._budget

    @budget.setter
    def budget(self, tokens: int) -> None:
        self._drop_prefetched()
        # Batches in flight were cut by the old budget, so they are made again.
        self._budget = tokens

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._ranks.size

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """Returns the next step's item.

        Raises:
            StopIteration: there are no more steps.
            IndexError: the next step depends on losses that the sampler has not observed.
        """
        start = time.perf_counter()
        # A sampler of an adaptive curriculum may still be waiting for losses; only the last step ends the loader.
        if self._next >= self._sampler.steps:
            raise StopIteration
        self._prefetch()
        try:
            item = self._prefetched.popleft().result() if self._prefetched else self._make_item(*self._work(self._next))
        except BaseException:
            self._drop_prefetched()  # what is prefetched follows the failed step, which is requested again
            raise
        self._next += 1
        self._prefetch()
        self.waited = time.perf_counter() - start
        return item

    def seek(self, step: int) -> None:
        """Continues with any step, earlier or later, or the same again."""
        self._drop_prefetched()
        self._next, self._used = step, (step, 0)

    def state(self, samples: int | None = None) -> dict[str, Any]:
        """Returns the state for `load_state` as JSON, the same in every process at the same step.

        Args:
            samples: used samples of the last step, of all processes and in the sampler's order; None: all.
        """
        step, used = self._next, self._used[1] if self._used[0] == self._next else 0
        if samples is not None:
            last = len(self._sampler.rows(step - 1)) if step else -1
            if not 0 <= samples <= last:
                raise ValueError(f"the last step has no {samples} samples")
            # A step that was used in part is done again from its first unused sample.
            if samples < last:
                step, used = step - 1, samples
        return {
            **self._identity(),
            "epoch": self._sampler.position(step).epoch if step < self._sampler.steps else None,
            "step": step,
            "samples": used,
            "world_size": self._ranks.size,
            "since": list(self._ranks.since),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state; with another number of processes, partition the remaining samples anew.

        Raises:
            UserError: it is of another training set or sampler.
        """
        for name, own in self._identity().items():
            if state[name] != own:
                what = f"the loader's state has {name} {state[name]}, and here it is {own}"
                raise UserError(what, fix="resume with the data and the order it was saved with")
        self.seek(state["step"])
        self._used = state["step"], state["samples"]
        # The same number of processes resumes the same partition; another number shares out what is left of the
        # epoch.
        since = tuple(state["since"]) if state["world_size"] == self._ranks.size else self._used
        self._ranks = self._partition(self._ranks.size, (since[0], since[1]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the threads, once they have finished the step at hand."""
        self._drop_prefetched()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _identity(self) -> dict[str, Any]:
        sampler = self._sampler
        return {
            "set": getattr(self._units, "id", None),
            "records": sampler.count,
            "batch_size": sampler.batch_size,
            "seed": sampler.seed,
            "steps": sampler.steps,
        }

    def _partition(self, size: int, since: tuple[int, int]) -> RankPartition:
        # A single process takes everything, and need not read the lengths of millions of units.
        lengths = unit_lengths(self._units) if size > 1 else np.zeros(0, np.int64)
        return RankPartition(self._sampler, lengths, size, since)

    def _drop_prefetched(self) -> None:
        while self._prefetched:
            self._prefetched.pop().cancel()

    def _prefetch(self) -> None:
        if self._threads is None:
            return
        # Undecided steps wait for losses, so they cannot be prefetched.
        last = min(self._next + self._config.prefetch, self._sampler.decided)
        for step in range(self._next + len(self._prefetched), last):
            self._prefetched.append(self._threads.submit(self._make_item, *self._work(step)))

    def _work(self, step: int) -> tuple[StepPosition, int, list[int], int]:
        """Collects the arguments of a thread: the sampler itself changes with each observed loss."""
        rows = self._sampler.rows(step)
        used = self._used[1] if step == self._used[0] else 0
        if self._ranks.size > 1:
            own = np.flatnonzero(self._ranks.ranks(step) == self.rank)
            rows = [rows[index] for index in own[own >= used].tolist()]
        else:
            rows = rows[used:]
        return self._sampler.position(step), step, rows, self._budget


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
        places: place in the step of each unit, in the micro-batches' order.
    """

    step: int
    epoch: int
    rows: list[list[int]]
    packed: list[Packed]
    lengths: BatchLengths
    tasks: list[int]
    places: list[int]


class BatchLoader(DataLoader[Sequence[Unit], Batch]):
    """Loads the batches of our trainer, packed into micro-batches on the model's device.

    Args:
        units: the training set.
        sampler: sampler of the rows of each step.
        budget: largest number of tokens of a micro-batch.
        device: device of the batches.
        padded: whether the model needs padded rows.
        tasks: int64 [units], each unit's task; no micro-batch holds units of two tasks. None: all are of one.
        options: see `LoaderOptions`.
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
        **options: Unpack[LoaderOptions],
    ) -> None:
        super().__init__(units, sampler, budget, **options)
        self._device, self._padded, self._tasks = device, padded, tasks

    def _make_item(self, position: StepPosition, step: int, rows: list[int], budget: int) -> Batch:
        by_task = group_by_task(rows, self._tasks)
        places = [place for _, group in by_task for place in group]
        rows = [rows[place] for place in places]
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
        packed = packs(parts, self._device, padded=self._padded)
        first, groups = 0, []
        for part in parts:
            groups.append(rows[first : first + len(part)])
            first += len(part)
        return Batch(step, position.epoch, groups, packed, BatchLengths.from_packed(units, packed), tasks, places)
