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

Source = TypeVar("Source", bound=Sequence[Unit])

Item = TypeVar("Item")


class LoaderOptions(TypedDict, total=False):
    """How a stream is read.

    Args:
        config: threads, and steps made ahead.
        rank: which process this is, from 0.
        world_size: how many there are.
    """

    config: LoaderConfig | None
    rank: int
    world_size: int


class DataLoader(ABC, Generic[Source, Item]):
    """What is made of an order's steps, one after another; a context manager, which stops its threads.

    `BatchLoader` makes the batches that the trainer computes, `RowLoader` packed rows for any other one; all that they share
    is here: threads, processes, and where to go on.

    The next steps are made in threads while the model works on one: what comes does not depend on how many threads
    there are or how far ahead they are. What goes wrong in a thread is raised where the step is asked for.

    Of several processes with the same arguments but ``rank``, each gets a part of every step's samples, in the order's
    order; together they get what a single one would.

    Args:
        units: the training set.
        order: whose rows are in which step; steps that are not decided are not made ahead.
        budget: tokens of a micro-batch, or a row, at most.
        config: threads, and steps made ahead.
        rank: which process this is, from 0.
        world_size: how many there are.
    """

    def __init__(
        self,
        units: Source,
        order: BatchSampler,
        budget: int,
        *,
        config: LoaderConfig | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"of {world_size} processes none is number {rank}")
        self._units, self._order, self._budget, self.rank = units, order, budget, rank
        self._config = config or LoaderConfig()
        self._threads = ThreadPoolExecutor(self._config.workers, "loader") if self._config.workers else None
        self._next, self._met = 0, (0, 0)  # samples of that step that are not to come again
        self._ahead: deque[Future[Item]] = deque()
        self._world = self._fresh_world(world_size, (0, 0))
        self.waited = 0.0
        """Seconds that the last step was waited for."""

    @abstractmethod
    def _make(self, place: StepPosition, step: int, rows: list[int], budget: int) -> Item:
        """What is made of a step's rows, perhaps in a thread: it reads nothing that the training may change."""

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch or a row at most. A new value holds from the next step on: none made before comes."""
        return self._budget

    @budget.setter
    def budget(self, tokens: int) -> None:
        self._forget_ahead()
        self._budget = tokens

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._world.size

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """What the next step is made into.

        Raises:
            StopIteration: that was the last step.
            IndexError: the next step hangs on losses that the order was not told.
        """
        start = time.perf_counter()
        if self._next >= self._order.steps:
            raise StopIteration
        self._make_ahead()
        try:
            made = self._ahead.popleft().result() if self._ahead else self._make(*self._work(self._next))
        except BaseException:
            self._forget_ahead()  # it is the step after it
            raise
        self._next += 1
        self._make_ahead()
        self.waited = time.perf_counter() - start
        return made

    def seek(self, step: int) -> None:
        """Go on with any step, earlier or later, or with the same again."""
        self._forget_ahead()
        self._next, self._met = step, (step, 0)

    def state(self, samples: int | None = None) -> dict[str, Any]:
        """What `load_state` takes, as JSON values; the same in every process that has come as far.

        Args:
            samples: how many of the last step, of all processes and in the order's order, were used; None: all.
        """
        step, met = self._next, self._met[1] if self._met[0] == self._next else 0
        if samples is not None:
            last = len(self._order.rows(step - 1)) if step else -1
            if not 0 <= samples <= last:
                raise ValueError(f"the last step has no {samples} samples")
            if samples < last:
                step, met = step - 1, samples
        return {
            **self._identity(),
            "epoch": self._order.place(step).epoch if step < self._order.steps else None,
            "step": step,
            "samples": met,
            "world_size": self._world.size,
            "since": list(self._world.since),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was asked for; where there were other processes, what is left is dealt anew.

        Raises:
            UserError: it is of another set or another order.
        """
        for name, here in self._identity().items():
            if state[name] != here:
                what = f"the loader's state has {name} {state[name]}, and here it is {here}"
                raise UserError(what, fix="go on with the data and the order it was saved with")
        self.seek(state["step"])
        self._met = state["step"], state["samples"]
        since = tuple(state["since"]) if state["world_size"] == self._world.size else self._met
        self._world = self._fresh_world(self._world.size, (since[0], since[1]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads; a step that one is busy with is waited for."""
        self._forget_ahead()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _identity(self) -> dict[str, Any]:
        order = self._order
        known = {"records": order.count, "batch_size": order.batch_size, "seed": order.seed, "steps": order.steps}
        return {"set": getattr(self._units, "id", None), **known}

    def _fresh_world(self, size: int, since: tuple[int, int]) -> RankPartition:
        lengths = unit_lengths(self._units) if size > 1 else np.zeros(0, np.int64)
        return RankPartition(self._order, lengths, size, since)

    def _forget_ahead(self) -> None:
        while self._ahead:
            self._ahead.pop().cancel()

    def _make_ahead(self) -> None:
        if self._threads is None:
            return
        last = min(self._next + self._config.prefetch, self._order.decided)
        for step in range(self._next + len(self._ahead), last):
            self._ahead.append(self._threads.submit(self._make, *self._work(step)))

    def _work(self, step: int) -> tuple[StepPosition, int, list[int], int]:
        """All that a thread is told."""
        rows = self._order.rows(step)
        met = self._met[1] if step == self._met[0] else 0
        if self._world.size > 1:
            mine = np.flatnonzero(self._world.ranks(step) == self.rank)
            rows = [rows[place] for place in mine[mine >= met].tolist()]
        else:
            rows = rows[met:]
        return self._order.place(step), step, rows, self._budget


@dataclass(frozen=True)
class BatchLengths:
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
    lengths: BatchLengths


class BatchLoader(DataLoader[Sequence[Unit], Batch]):
    """The batches of an order's steps one after another, as `DataLoader` has it.

    Args:
        units: the training set.
        order: whose rows are in which step.
        budget: tokens of a micro-batch at most.
        device: where the batches are wanted.
        padded: whether the model needs padded rows.
        reading: see `LoaderOptions`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        order: BatchSampler,
        budget: int,
        *,
        device: torch.device | str = "cpu",
        padded: bool = False,
        **reading: Unpack[LoaderOptions],
    ) -> None:
        super().__init__(units, order, budget, **reading)
        self._device, self._padded = device, padded

    def _make(self, place: StepPosition, step: int, rows: list[int], budget: int) -> Batch:
        take = getattr(self._units, "take", None)
        units = take(rows).views() if take else [self._units[row] for row in rows]
        parts = list(micro_batches(units, budget))
        packed = packs(parts, self._device, padded=self._padded)
        first, groups = 0, []
        for part in parts:
            groups.append(rows[first : first + len(part)])
            first += len(part)
        return Batch(step, place.epoch, groups, packed, BatchLengths.of(units, packed))
