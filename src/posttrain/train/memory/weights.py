"""The parameters of a model in training, and the bytes of weights, masters, gradients and optimiser state."""

import math
from dataclasses import dataclass
from typing import Any, assert_never

from posttrain.models.shape import ModelShape, meta_model, model_shape
from posttrain.train.config import TrainConfig
from posttrain.train.lora import attach_lora
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.parameter_groups import ParameterKind, parameter_locations

_QUANTISED_BLOCK = 256  # numbers that share a scale in torchao's 8-bit moments

_QUANTISED_MINIMUM = 4096  # numbers below which it keeps 32 bits


@dataclass(frozen=True)
class ParameterSpec:
    """The shape and role of one parameter. A tied head counts once, as an embedding."""

    name: str
    kind: ParameterKind
    depth: int | None
    shape: tuple[int, ...]
    trained: bool

    @property
    def adapter(self) -> bool:
        """True if it belongs to a LoRA adapter."""
        return ".lora_" in self.name

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSpec:
    """The shape and the parameters of a model, which decide its memory.

    Args:
        shape: its sizes.
        weights: its parameters, an adapter's too.
    """

    shape: ModelShape
    weights: tuple[ParameterSpec, ...]

    @classmethod
    def from_config(cls, config: Any, train: TrainConfig) -> "ModelSpec":
        """Builds from a transformers config, for a training with `train`.

        Raises:
            UserError: no model of this kind has this config, or LoRA does not find what it is to adapt.
        """
        classifier = train.spec.classifier
        model = meta_model(config, classifier=classifier)
        return cls.from_model(
            attach_lora(model, train.lora, low_cpu_mem_usage=True) if train.method == "lora" else model
        )

    @classmethod
    def from_model(cls, model: Any) -> "ModelSpec":
        """Builds from a model with its adapter, perhaps on the ``meta`` device."""
        where = parameter_locations(model)
        return cls(
            model_shape(model),
            tuple(
                ParameterSpec(name, *where[name], tuple(weight.shape), weight.requires_grad)
                for name, weight in model.named_parameters()
            ),
        )

    def count(self, *kinds: ParameterKind, trained: bool = False) -> int:
        """Counts the elements of parameters of these kinds, or of all; with ``trained`` only trained ones."""
        return sum(
            weight.count
            for weight in self.weights
            if (not kinds or weight.kind in kinds) and (weight.trained or not trained)
        )

    def table(self) -> dict[str, int]:
        """Counts elements by kind, of adapters, and of all trained parameters."""
        kinds = dict.fromkeys(weight.kind for weight in self.weights if not weight.adapter)
        return {
            **{
                kind: sum(weight.count for weight in self.weights if weight.kind == kind and not weight.adapter)
                for kind in kinds
            },
            "adapter": sum(weight.count for weight in self.weights if weight.adapter),
            "trained": self.count(trained=True),
        }


def parameter_bytes(spec: ModelSpec, config: TrainConfig, *, trained: bool = False) -> int:
    """Counts the bytes of all weights, or of trained ones; adapters are always float32."""
    number = 4 if config.dtype == "float32" else 2
    weights = (weight for weight in spec.weights if weight.trained or not trained)
    return sum(weight.count * (4 if weight.adapter else number) for weight in weights)


def master_bytes(spec: ModelSpec, config: TrainConfig) -> int:
    """Counts the bytes of float32 copies, which all trained 16-bit weights have (``optim/master_weights.py``)."""
    if config.dtype == "float32":
        return 0
    return sum(4 * weight.count for weight in spec.weights if weight.trained and not weight.adapter)


def gradient_bytes(spec: ModelSpec) -> int:
    """Counts the bytes of the gradients, which are summed in float32."""
    return 4 * spec.count(trained=True)


def ema_bytes(spec: ModelSpec, config: TrainConfig) -> int:
    """Counts the bytes of the float32 moving averages."""
    # float32 for 16-bit weights too: steps of 1 - decay would be rounded away.
    return 0 if config.ema is None else 4 * spec.count(trained=True)


def optimizer_state_bytes(spec: ModelSpec, config: OptimizerConfig) -> int:
    """Counts the bytes of the optimiser's state."""
    return sum(parameter_state_bytes(weight, config) for weight in spec.weights if weight.trained)


def parameter_state_bytes(weight: ParameterSpec, config: OptimizerConfig) -> int:
    """Counts the bytes of the optimiser's state for a weight of n numbers.

    AdamW two moments, 8n. Muon's momentum 4n for hidden matrices, AdamW else. SGD nothing. Adafactor a number
    a row and a column of the last two dimensions (arXiv:1804.04235, algorithm 4), of vectors 4n. 8-bit Adam
    (arXiv:2110.02861) a byte and a 256th of a scale in each of two moments, of matrices; AdamW else.
    """
    count = weight.count
    match config.name:
        case "adamw":
            return 8 * count
        case "sgd":
            return 0
        case "adafactor":
            if len(weight.shape) < 2:
                return 4 * count
            *outer, rows, columns = weight.shape
            return 4 * math.prod(outer) * (rows + columns)
        case "muon":
            return 4 * count if _is_hidden_matrix(weight) else 8 * count
        case "adam8bit":
            blocks = count >= _QUANTISED_MINIMUM and count % _QUANTISED_BLOCK == 0
            if weight.kind in ("matrix", "head") and blocks:
                return 2 * (count + 4 * count // _QUANTISED_BLOCK)
            return 8 * count
        case name:
            assert_never(name)


def _is_hidden_matrix(weight: ParameterSpec) -> bool:
    return weight.kind == "matrix" and len(weight.shape) == 2


def step_bytes(spec: ModelSpec, config: OptimizerConfig) -> int:
    """Counts the optimiser's working memory beside its state, while it steps one weight of n numbers.

    Fused AdamW nothing. Adafactor its update, 4n. SGD the gradient with decay, 4n. Muon
    the update 4n, three bfloat16 matrices 2n and two Gram matrices (https://kellerjordan.github.io/posts/muon/). 8-bit
    Adam is one compiled loop.
    """
    return max((_weight_step_bytes(weight, config) for weight in spec.weights if weight.trained), default=0)


def _weight_step_bytes(weight: ParameterSpec, config: OptimizerConfig) -> int:
    match config.name:
        case "adamw" | "adam8bit":
            return 0
        case "adafactor":
            return 4 * weight.count
        case "sgd":
            return 4 * weight.count * bool(config.weight_decay)
        case "muon":
            return 10 * weight.count + 4 * min(weight.shape) ** 2 if _is_hidden_matrix(weight) else 0
        case name:
            assert_never(name)


def snapshot_bytes(spec: ModelSpec, config: TrainConfig) -> int:
    """Counts the bytes of the copy that checkpoints are written from in the background."""
    checkpoint = config.checkpoint
    if not checkpoint.background or (checkpoint.every_seconds is None and checkpoint.every_steps is None):
        return 0
    # Checkpoints hold the trained weights in float32, which are the masters of 16-bit ones.
    copied = 4 * spec.count(trained=True) + ema_bytes(spec, config)
    return copied + optimizer_state_bytes(spec, config.optimizer)
