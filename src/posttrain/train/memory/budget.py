"""The token budget of a micro-batch: as large as fits and still makes training faster."""

from dataclasses import dataclass

from posttrain.train.config import TrainConfig
from posttrain.train.memory.batch import MicroBatch
from posttrain.train.memory.estimate import Estimate, estimate
from posttrain.train.memory.weights import Blueprint

_ENOUGH = {"cpu": 4096, "cuda": 32768}
"""Tokens beyond which larger matrix products are no faster."""
_SMALLEST = 256
_SHARE = 0.92
"""Of the memory that is there; the rest is what the estimate may be wrong by (benchmarks/memory_estimate.py)."""


@dataclass(frozen=True)
class Budget:
    """A token budget, what it takes, and whether that fits.

    Where even the smallest does not fit, it is that one.
    """

    tokens: int
    estimate: Estimate
    fits: bool


def choose_budget(
    blueprint: Blueprint,
    config: TrainConfig,
    available: int | None,
    longest: int | None = None,
    *,
    device: str = "cpu",
    process: int = 0,
) -> Budget:
    """What ``train.micro_batch_tokens: auto`` is: the largest power of two that fits, up to where speed ends.

    Args:
        blueprint: the model.
        config: how it is trained.
        available: bytes (`available.available_bytes`); None where nobody knows, and anything fits.
        longest: tokens of the longest sequence, where it is known; no budget is smaller than what it needs.
        device: ``cpu`` or ``cuda``.
        process: bytes of the process without a model.
    """
    tokens = _ENOUGH.get(device, _ENOUGH["cuda"])
    while True:
        found = estimate(blueprint, config, MicroBatch.full(tokens, config, longest), device=device, process=process)
        if fits(found, available) or tokens <= _SMALLEST:
            return Budget(tokens, found, fits(found, available))
        tokens //= 2


def fits(found: Estimate, available: int | None) -> bool:
    """Whether an estimate fits into what is available."""
    return available is None or found.total <= _SHARE * available
