"""Choose ``micro_batch_tokens: auto``: the largest micro-batch that fits into the memory available here."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from posttrain.jobs.memory import free_bytes, process_bytes
from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder
from posttrain.train.config import TrainConfig
from posttrain.train.memory.estimate import MemoryEstimate, MicroBatch, estimate_memory
from posttrain.train.memory.weights import ModelSpec, parameter_bytes
from posttrain.train.recovery import read_recovery_log

log = logging.getLogger("posttrain")

_DEFAULT_TOKENS = 4096
"""Tokens for a model that cannot be estimated."""

_FULL_SPEED_TOKENS = {"cpu": 4096, "cuda": 32768}
"""Tokens beyond which larger matrix products are no faster."""

_MIN_TOKENS = 256

_USABLE_SHARE = 0.92
"""Share of the available memory; the rest covers the estimate's error (benchmarks/memory_estimate.py)."""


def resolve_token_budget(
    config: TrainConfig, lm: LanguageModel, longest: int, scratch: Path, tasks: int = 1
) -> TrainConfig:
    """Resolves ``micro_batch_tokens: auto`` to a number: the one decided before, or one that fits here.

    Args:
        lm: the model as it is trained, its adapter on it.
        longest: tokens of the longest sequence.
        scratch: folder of the training; stores the decision, so that a resumed training has the same micro-batches.
        tasks: most tasks of a step, as `estimate_memory` takes it.
    """
    if config.micro_batch_tokens != "auto":
        return config
    recovery_log = read_recovery_log(scratch)
    if recovery_log.auto_budget is None:
        make_folder(scratch)
        recovery_log.auto_budget = _fitting_budget(config, lm, longest, tasks)
        recovery_log.write(scratch)
    return config.model_copy(update={"micro_batch_tokens": recovery_log.auto_budget})


def _fitting_budget(config: TrainConfig, lm: LanguageModel, longest: int, tasks: int) -> int:
    device = lm.device.type
    available = available_bytes(device)
    try:
        spec = ModelSpec.from_model(lm.model)
        # The weights are in memory already, and part of the estimate.
        process = max(0, process_bytes() - parameter_bytes(spec, config))
        budget = choose_budget(spec, config, available, longest, device=device, process=process, tasks=tasks)
    except UserError:
        log.info("  the memory of this model cannot be measured: micro-batches of %d tokens", _DEFAULT_TOKENS)
        return _DEFAULT_TOKENS
    if not budget.fits:
        log.warning("  the estimate is that memory may run out: posttrain plan says of what")
    return budget.tokens


@dataclass(frozen=True)
class TokenBudget:
    """A token budget, its memory estimate, and whether that fits.

    Where even the smallest does not fit, it is that one.
    """

    tokens: int
    estimate: MemoryEstimate
    fits: bool


def choose_budget(
    spec: ModelSpec,
    config: TrainConfig,
    available: int | None,
    longest: int | None = None,
    *,
    device: str = "cpu",
    process: int = 0,
    tasks: int = 1,
) -> TokenBudget:
    """Chooses the largest power of two of tokens that fits, up to full speed.

    Args:
        spec: the model.
        config: settings of its training.
        available: bytes (`available.available_bytes`); None where nobody knows, and anything fits.
        longest: tokens of the longest sequence, where it is known; no budget is smaller than what it needs.
        device: ``cpu`` or ``cuda``.
        process: bytes of the process without a model.
        tasks: most tasks of a step, as `estimate_memory` takes it.
    """
    tokens = _FULL_SPEED_TOKENS.get(device, _FULL_SPEED_TOKENS["cuda"])
    while True:
        batch = MicroBatch.full(tokens, config, longest)
        estimate = estimate_memory(spec, config, batch, device=device, process=process, tasks=tasks)
        if fits(estimate, available) or tokens <= _MIN_TOKENS:
            return TokenBudget(tokens, estimate, fits(estimate, available))
        tokens //= 2


def fits(estimate: MemoryEstimate, available: int | None) -> bool:
    """Returns whether an estimate fits into the available bytes."""
    return available is None or estimate.total <= _USABLE_SHARE * available


def available_bytes(device: str = "cpu") -> int | None:
    """Returns the bytes available to this process, its own included; None where the system does not report it.

    Args:
        device: ``cpu``, where `free_bytes` says what is free, or ``cuda``.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch has reserved is ours to use, although the driver counts it as taken.
        return int(free) + torch.cuda.memory_reserved(device)
    free_now = free_bytes()
    return None if free_now is None else free_now + process_bytes()
