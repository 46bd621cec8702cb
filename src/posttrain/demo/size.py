"""Sizes the demo to this machine: as many labels and epochs as fit into the minutes that the user has."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from posttrain.models.precision import ComputePrecision, choose_precision
from posttrain.store.logs import EVENT

ROUNDS = 3

# FLOPs for each word of a message, all products of SmolLM2-135M: forward and backward passes over the message with its
# system prompt, template and answer; and a forward pass over it and all 28 labels.
_TRAINED_FLOPS, _SCORED_FLOPS = 2.3e9, 1.8e9

# Share of the measured peak that rows this short reach: measured in a demo with AVX2, and in trainings with AMX, where
# products are so fast that the rest takes most of the time.
_SHARE_OF_PEAK: dict[ComputePrecision, float] = {"float32": 0.9, "bfloat16": 0.25}

# Of every run: conversion of the model, cleaning, sentence embeddings, writing, the report.
_FIXED_SECONDS = 60.0

_TEST_RECORDS = 300

_OVERRUN = 1.2  # times the minutes, from which the demo ends early

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Machine:
    """The speed of a machine.

    Attributes:
        precision: The faster precision.
        flops: Measured peak of matrix products in it, FLOP/s.
    """

    precision: ComputePrecision
    flops: float

    @classmethod
    def measure(cls) -> "Machine":
        """Measures this machine."""
        import torch

        from posttrain.models.language_model import DTYPES
        from posttrain.models.machine_rate import matmul_rate

        precision = choose_precision()
        return cls(precision, matmul_rate(DTYPES[precision], "cuda" if torch.cuda.is_available() else "cpu"))


@dataclass(frozen=True)
class DemoSize:
    """The sizes of a demo.

    Attributes:
        per_round: Labels a round.
        epochs: Passes over the training set.
        pool_sample: Pool records that a round scores.
        sample: Test records that a round measures on.
    """

    per_round: int
    epochs: int
    pool_sample: int
    sample: int

    def seconds(self, machine: Machine, mean_words: float) -> float:
        """Predicts the seconds of all rounds.

        Args:
            mean_words: Mean number of words in a message.
        """
        # Round n trains on the labels of n rounds, and all but the first score the pool with a trained champion.
        trained = self.epochs * self.per_round * ROUNDS * (ROUNDS + 1) // 2
        scored = (ROUNDS - 1) * self.pool_sample + (ROUNDS + 1) * self.sample + _TEST_RECORDS
        work = mean_words * (trained * _TRAINED_FLOPS + scored * _SCORED_FLOPS)
        return _FIXED_SECONDS + work / (_SHARE_OF_PEAK[machine.precision] * machine.flops)


@dataclass
class RoundTimer:
    """Ends the demo early where its rounds take longer than its size was chosen for, as beside other programs.

    Attributes:
        minutes: What the demo may take about.
        clock: Returns seconds.
    """

    minutes: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._begin = self._last = self.clock()

    def allows(self, number: int) -> bool:
        """Returns whether a round may start, by what the one before took; logs why it may not."""
        now = self.clock()
        took, self._last = now - self._last, now
        # It trains on the labels of all rounds before. Round 0 trains nothing, and tells nothing.
        end = (now - self._begin + took * number / max(1, number - 1)) / 60
        if number < 2 or end <= _OVERRUN * self.minutes:
            return True
        log.info(
            "round %d would end after %.0f minutes: other programs run, or the machine is slower than measured; "
            "`posttrain run` in the demo's folder runs it",
            number,
            end,
            extra=EVENT,
        )
        return False


def choose_size(minutes: float, machine: Machine, mean_words: float) -> DemoSize:
    """Returns the largest size that fits into the minutes, or the smallest."""
    sizes = list(_sizes())
    return next((size for size in sizes if size.seconds(machine, mean_words) <= 60 * minutes), sizes[-1])


def _sizes() -> Iterator[DemoSize]:
    """Yields sizes, the largest first."""
    # Fewer epochs before fewer labels: a training ends by itself where it has nothing left to learn.
    for per_round in (64, 56, 48, 40, 32, 24):
        for epochs in (6, 5, 4):
            scored = 5 * per_round
            yield DemoSize(per_round, epochs, pool_sample=min(300, scored), sample=min(200, 3 * per_round))
