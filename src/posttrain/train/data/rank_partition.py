"""Partitions each step's samples among processes, so that all have about as many tokens."""

from bisect import bisect_left
from heapq import heapify, heapreplace

import numpy as np

from posttrain.train.data.batch_sampler import BatchSampler


def partition_samples(lengths: np.ndarray, world_size: int) -> list[np.ndarray]:
    """Deal samples to processes, the longest first, each to the one with the fewest tokens (Graham 1969, LPT).

    The shards' sizes differ by the longest sample at most: by 5 % or less where each has 20 times its tokens.

    Args:
        lengths: int [N], tokens of each sample.
        world_size: number of processes.

    Returns:
        For each process int64, the places of its samples, ascending. Every sample is in one of them.
    """
    ranks = assign_ranks(lengths, [0] * world_size)
    return [np.flatnonzero(ranks == rank) for rank in range(world_size)]


def assign_ranks(lengths: np.ndarray, loads: list[int]) -> np.ndarray:
    """int64 [N]: the process of each sample, as `partition_samples` deals them.

    Args:
        lengths: int [N], tokens of each sample.
        loads: tokens that each process has already; what it is dealt is added.
    """
    found = np.zeros(len(lengths), np.int64)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapify(heap)
    order = np.argsort(-np.asarray(lengths), kind="stable")
    for place, length in zip(order.tolist(), np.asarray(lengths)[order].tolist(), strict=True):
        load, rank = heap[0]
        found[place] = rank
        heapreplace(heap, (load + length, rank))
    for load, rank in heap:
        loads[rank] = load
    return found


class RankPartition:
    """The shares of some processes in every step of an order, which all of them can tell without asking each other.

    The samples of a step are dealt to those that had the fewest tokens so far in its epoch, so that after any step no
    process has had more tokens in it than another by more than the longest sample. Where a step is asked for out of
    turn, those before it in its epoch are dealt first, by their lengths alone: no sample is read for that.

    Args:
        order: of the samples.
        lengths: int [samples], tokens of each.
        size: number of processes.
        since: step, and samples of it, that were met before there were so many processes; what comes after them in
            their epoch is dealt anew.
    """

    def __init__(self, order: BatchSampler, lengths: np.ndarray, size: int, since: tuple[int, int] = (0, 0)) -> None:
        self.size, self.since = size, since
        self._order, self._lengths = order, np.asarray(lengths)
        self._at, self._epoch, self._loads = -1, -1, [0] * size  # after which step

    def ranks(self, step: int) -> np.ndarray:
        """int64 [samples of the step]: who meets each; -1 for those that were met before ``phase_seconds_since``.

        Raises:
            IndexError: there is no such step, or its samples are not decided.
        """
        epoch = self._order.place(step).epoch
        if not (self._epoch == epoch and self._at < step):
            first = bisect_left(range(self._order.steps), epoch, key=lambda one: self._order.place(one).epoch)
            self._at, self._epoch, self._loads = max(first, self.since[0]) - 1, epoch, [0] * self.size
        if step < self.since[0]:
            return np.full(len(self._order.rows(step)), -1)
        for one in range(self._at + 1, step + 1):
            found = self._dealt(one)
            self._at = one
        return found

    def _dealt(self, step: int) -> np.ndarray:
        rows = self._order.rows(step)
        before = self.since[1] if step == self.since[0] else 0
        ranks = np.full(len(rows), -1)
        ranks[before:] = assign_ranks(self._lengths[rows[before:]], self._loads)
        return ranks
