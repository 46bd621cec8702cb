"""Memory that is there for as long as training goes on: weights, masters, gradient sums, the optimiser's state."""

import math

from posttrain.train.config import TrainConfig
from posttrain.train.memory.weights import Blueprint, Weight
from posttrain.train.optimizers.config import OptimizerConfig

_BLOCK = 256  # numbers that share a scale in torchao's 8-bit moments
_SMALL = 4096  # numbers below which it keeps 32 bits


def parameter_bytes(blueprint: Blueprint, config: TrainConfig, *, trained: bool = False) -> int:
    """Of all weights, or those that are trained: 2 bytes a number in 16 bits, else 4; adapters are always float32."""
    number = 4 if config.dtype == "float32" else 2
    chosen = (one for one in blueprint.weights if one.trained or not trained)
    return sum(one.count * (4 if one.adapter else number) for one in chosen)


def master_bytes(blueprint: Blueprint, config: TrainConfig) -> int:
    """Of float32 copies: every trained weight has one that is not float32 itself (``train/masters.py``)."""
    if config.dtype == "float32":
        return 0
    return sum(4 * one.count for one in blueprint.weights if one.trained and not one.adapter)


def sum_bytes(blueprint: Blueprint) -> int:
    """Of gradients, which are summed in float32."""
    return 4 * blueprint.count(trained=True)


def average_bytes(blueprint: Blueprint, config: TrainConfig) -> int:
    """Of moving averages of the weights, float32."""
    return 0 if config.ema.decay is None else 4 * blueprint.count(trained=True)


def state_bytes(blueprint: Blueprint, config: OptimizerConfig) -> int:
    """Of what the optimiser remembers."""
    return sum(weight_state(one, config) for one in blueprint.weights if one.trained)


def weight_state(weight: Weight, config: OptimizerConfig) -> int:
    """Bytes that the optimiser remembers of a weight of n numbers.

    AdamW two moments, 8n. Muon's momentum 4n for hidden matrices, AdamW else. SGD 4n with momentum. Adafactor a number
    a row and a column of the last two dimensions (arXiv:1804.04235, algorithm 4), of vectors 4n. 8-bit Adam
    (arXiv:2110.02861) a byte and a 256th of a scale in each of two moments, of matrices; AdamW else.
    """
    count, name = weight.count, config.name
    if name == "sgd":
        return 4 * count if config.momentum else 0
    if name == "adafactor":
        if len(weight.shape) < 2:
            return 4 * count
        *outer, rows, columns = weight.shape
        return 4 * math.prod(outer) * (rows + columns)
    if name == "muon" and weight.kind == "matrix" and len(weight.shape) == 2:
        return 4 * count
    blocks = count >= _SMALL and count % _BLOCK == 0
    if name == "adam8bit" and weight.kind in ("matrix", "head") and blocks:
        return 2 * (count + 4 * count // _BLOCK)
    return 8 * count


def step_bytes(blueprint: Blueprint, config: OptimizerConfig) -> int:
    """The most that the optimiser works with beside its state, while it steps one weight of n numbers.

    Fused AdamW nothing. Adafactor its update, 4n. SGD the gradient with decay, and with Nesterov's step, 4n each. Muon
    the update 4n, three bfloat16 matrices 2n and two Gram matrices (https://kellerjordan.github.io/posts/muon/). 8-bit
    Adam is one compiled loop.
    """
    most = 0
    for one in blueprint.weights:
        if not one.trained:
            continue
        if config.name == "adafactor":
            most = max(most, 4 * one.count)
        elif config.name == "sgd":
            most = max(most, 4 * one.count * (bool(config.weight_decay) + bool(config.nesterov and config.momentum)))
        elif config.name == "muon" and one.kind == "matrix" and len(one.shape) == 2:
            most = max(most, 10 * one.count + 4 * min(one.shape) ** 2)
    return most


def snapshot_bytes(blueprint: Blueprint, config: TrainConfig) -> int:
    """Of the copy of masters, averages and state that a checkpoint is written from in the background."""
    checkpoint = config.checkpoint
    if not checkpoint.background or (checkpoint.every_seconds is None and checkpoint.every_steps is None):
        return 0
    kept = 4 * blueprint.count(trained=True) + average_bytes(blueprint, config)
    return kept + state_bytes(blueprint, config.optimizer)
