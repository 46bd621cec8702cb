"""Partitions each step's samples among processes, so that all have about as many tokens."""

from bisect import bisect_left
from heapq import heapify, heapreplace

import numpy as np

from posttrain.train.data.batch_sampler import BatchSampler


def assign_ranks(lengths: np.ndarray, loads: list[int]) -> np.ndarray:
    """int64 [N]: the process of each sample, the longest first to the one with the fewest tokens (Graham 1969, LPT).

    The loads differ by the longest sample at most: by 5 % or less if each is 20 times as large.

    Args:
        lengths: int [N], tokens of each sample.
        loads: tokens of each process so far; updated in place.
    """
    ranks = np.zeros(len(lengths), np.int64)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapify(heap)
    # R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969.
    order = np.argsort(-np.asarray(lengths), kind="stable")
    for sample, length in zip(order.tolist(), np.asarray(lengths)[order].tolist(), strict=True):
        load, rank = heap[0]
        ranks[sample] = rank
        heapreplace(heap, (load + length, rank))
    for load, rank in heap:
        loads[rank] = load
    return ranks


class RankPartition:
    """Partitions every step's samples among processes; each computes the same partition without communication.

    A step's samples go to the processes with the fewest tokens so far in its epoch, so that after any step the loads
    of an epoch differ by the longest sample at most.

    Args:
        sampler: chooses the samples.
        lengths: int [samples], tokens of each.
        size: number of processes.
    """

    def __init__(self, sampler: BatchSampler, lengths: np.ndarray, size: int) -> None:
        self._sampler, self._lengths, self._size = sampler, np.asarray(lengths), size
        self._at, self._epoch, self._loads = -1, -1, [0] * size  # after which step

    def ranks(self, step: int) -> np.ndarray:
        """int64 [samples of the step]: the process of each.

        Raises:
            IndexError: there is no such step, or its samples are not decided.
        """
        epoch = self._sampler.position(step).epoch
        # Loads depend on the steps before in the epoch only, so that resuming replays one epoch at most.
        if not (self._epoch == epoch and self._at < step):
            first = bisect_left(range(self._sampler.steps), epoch, key=lambda step: self._sampler.position(step).epoch)
            self._at, self._epoch, self._loads = first - 1, epoch, [0] * self._size
        # A step out of turn: those before it in its epoch are assigned first, by their lengths alone.
        for earlier in range(self._at + 1, step + 1):
            ranks = assign_ranks(self._lengths[self._sampler.rows(earlier)], self._loads)
            self._at = earlier
        return ranks
