"""The parameters of a model in training, and the bytes of weights, masters, gradients and optimiser state."""

import math
from dataclasses import dataclass, field
from typing import Any, assert_never

from posttrain.models.shape import ModelShape, meta_model, model_shape
from posttrain.train.config import TrainConfig
from posttrain.train.lora import attach_lora
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.parameter_groups import ParameterKind, parameter_locations


@dataclass(frozen=True)
class ParameterSpec:
    """The shape and role of one parameter. A tied head counts once, as an embedding."""

    name: str
    kind: ParameterKind
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
        config: transformers config of its text model.
    """

    shape: ModelShape
    weights: tuple[ParameterSpec, ...]
    config: Any = field(compare=False)

    @classmethod
    def from_config(cls, config: Any, train: TrainConfig) -> "ModelSpec":
        """Builds from a transformers config, for a training with `train`.

        Raises:
            UserError: no model of this kind has this config, or LoRA does not find what it is to adapt.
        """
        model = meta_model(config, classifier=train.spec.classifier)
        return cls.from_model(
            attach_lora(model, train.lora, low_cpu_mem_usage=True) if train.method == "lora" else model
        )

    @classmethod
    def from_model(cls, model: Any) -> "ModelSpec":
        """Builds from a model with its adapter, perhaps on the ``meta`` device."""
        where = parameter_locations(model)
        weights = tuple(
            ParameterSpec(name, where[name].kind, tuple(weight.shape), weight.requires_grad)
            for name, weight in model.named_parameters()
        )
        return cls(model_shape(model), weights, model.config.get_text_config())

    def count(self, *, trained: bool = False) -> int:
        """Counts the elements of all parameters, or of trained ones."""
        return sum(weight.count for weight in self.weights if weight.trained or not trained)

    def table(self) -> dict[str, int]:
        """Counts elements by kind, of adapters, and of all trained parameters."""
        kinds: dict[str, int] = {}
        for weight in self.weights:
            kind = "adapter" if weight.adapter else weight.kind
            kinds[kind] = kinds.get(kind, 0) + weight.count
        return {"adapter": 0} | kinds | {"trained": self.count(trained=True)}


def parameter_bytes(spec: ModelSpec, config: TrainConfig, *, trained: bool = False) -> int:
    """Counts the bytes of all weights, or of trained ones; adapters are always float32."""
    number = 4 if config.dtype == "float32" else 2
    return sum(
        weight.count * (4 if weight.adapter else number) for weight in spec.weights if weight.trained or not trained
    )


def master_bytes(spec: ModelSpec, config: TrainConfig) -> int:
    """Counts the bytes of float32 copies, which all trained 16-bit weights have (``optim/master_weights.py``)."""
    if config.dtype == "float32":
        return 0
    return sum(4 * weight.count for weight in spec.weights if weight.trained and not weight.adapter)


def optimizer_state_bytes(spec: ModelSpec, config: OptimizerConfig) -> int:
    """Counts the bytes of the optimiser's state."""
    return sum(_state_bytes(weight, config) for weight in spec.weights if weight.trained)


def _state_bytes(weight: ParameterSpec, config: OptimizerConfig) -> int:
    """Counts the bytes of the optimiser's state for a weight of n numbers.

    AdamW two moments, 8n. SGD nothing. Adafactor a number a row and a column of the last two dimensions
    (arXiv:1804.04235, algorithm 4), of vectors 4n. Muon's momentum 4n for hidden matrices, and 8-bit Adam
    (arXiv:2110.02861) a byte and a 256th of a scale in each of two moments for matrices; AdamW for the rest of both.
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
            return 4 * count if weight.kind == "matrix" and len(weight.shape) == 2 else 8 * count
        case "adam8bit":
            # Small tensors, and those that are not a multiple of a block, keep 32 bits.
            is_quantised = weight.kind in ("matrix", "head") and count >= 4096 and count % 256 == 0
            return 2 * (count + count // 64) if is_quantised else 8 * count
        case name:
            assert_never(name)


def snapshot_bytes(spec: ModelSpec, config: TrainConfig) -> int:
    """Counts the bytes of the copy that checkpoints are written from in the background."""
    if not config.checkpoint.background or not config.checkpoint.enabled:
        return 0
    # Checkpoints hold the trained weights in float32, which are the masters of 16-bit ones.
    return 4 * spec.count(trained=True) + optimizer_state_bytes(spec, config.optimizer)
