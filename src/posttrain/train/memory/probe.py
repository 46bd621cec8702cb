"""Measures the activations that autograd saves of a decoder layer, on a small random model of the same family.

The probe has one layer and then two, so that their difference is a layer; it is narrower than the model by a divisor of
its heads, and a token's activations grow with the width. It runs the training's own forward pass (fused norms, packed
attention, adapters), so that whatever they save is counted, and takes a fraction of a second whatever the model's size.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from posttrain.models.chat import TokenizedExample
from posttrain.models.fused import fuse_layers
from posttrain.models.head import predicting_states
from posttrain.models.language_model import DTYPES, LanguageModel
from posttrain.models.loading import model_file_errors
from posttrain.models.packing import pack, packed_attention
from posttrain.models.shape import change_config, decoder_layers, resized_config
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.lora import attach_lora
from posttrain.train.regularization.layers import set_dropout

_WIDTH = 256  # of the probe at least; narrower matrices leave more to what does not grow with the width

_SIZES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "inner": "intermediate_size",
}

_VOCABULARY = {"vocab_size": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}

_RANKS = (8, 16)  # of the probe's adapter; the cost of any other follows, as activations grow linearly with the rank

_MAX_TOKENS = 2048  # of the probe: longer sequences save no more a token, as their scores are computed again


@dataclass(frozen=True)
class ActivationCost:
    """Bytes a token that autograd saves until the backward pass.

    Args:
        layer: of a decoder layer.
        rest: of embeddings, the last norm and positions.
        stream: of a layer's input, which is all that stays of a layer that is computed again.
    """

    layer: float
    rest: float
    stream: float


def activation_cost(config: Any, train: TrainConfig, longest: int, device: str) -> ActivationCost:
    """Measures the activations of a training.

    Args:
        config: transformers config of the model, or of its text model.
        train: settings of the training.
        longest: tokens of the longest sequence.
        device: of the training; the probe runs on a CPU where there is no such device.

    Raises:
        UserError: models of this family cannot be created from a config, or cannot be adapted.
    """
    noise = train.noise.model_copy(update={"neftune": 0.0})
    there = device if device == "cpu" or torch.cuda.is_available() else "cpu"
    kind: Any = type(config)

    def measure(rank: int) -> ActivationCost:
        # What the cost depends on alone, so that a process measures it once.
        lora = train.lora.model_copy(update={"rank": rank, "ranks": {}, "supernet": {}, "gates": None})
        settings = {"precision": train.precision, "method": train.method, "lora": lora.model_dump(), "noise": noise}
        described = config.to_json_string(), TrainConfig(**settings).model_dump_json()
        return _measure(kind, *described, longest, there)

    low = measure(_RANKS[0])
    rank = max([train.lora.rank, *train.lora.ranks.values()]) / _narrowed(config, 1)[1]
    if train.method != "lora" or rank == _RANKS[0]:
        return low
    high = measure(_RANKS[1])
    slope = (rank - _RANKS[0]) / (_RANKS[1] - _RANKS[0])
    return ActivationCost(
        low.layer + slope * (high.layer - low.layer), low.rest + slope * (high.rest - low.rest), low.stream
    )


@lru_cache(32)
def _measure(kind: Any, config: str, settings: str, longest: int, device: str) -> ActivationCost:
    described, train = kind.from_dict(json.loads(config)), TrainConfig.model_validate_json(settings)
    tokens = max(2, min(longest, _MAX_TOKENS))
    (one, weights, stream), (two, more_weights, _) = (
        _saved_bytes(described, layers, train, tokens, device) for layers in (1, 2)
    )
    # Under autocast the copies of the weights are saved too, whatever the number of tokens.
    copies = 2 * (more_weights - weights) if train.precision == "autocast" else 0
    layer = (two - one - copies) / tokens
    return ActivationCost(layer, (one - copies) / tokens - layer, stream / tokens)


def _saved_bytes(config: Any, layers: int, train: TrainConfig, tokens: int, device: str) -> tuple[int, int, int]:
    """Returns the bytes that a forward pass saves, the elements of matrices, and a layer's input, times the scale."""
    from transformers import AutoModelForCausalLM

    narrow, scale = _narrowed(config, layers)
    with model_file_errors("no causal language model has this config", "model"), torch.random.fork_rng([]):
        family: Any = AutoModelForCausalLM
        model = family.from_config(narrow, dtype=DTYPES[train.dtype], trust_remote_code=False)
    if train.method == "lora":
        model = attach_lora(model, train.lora)
    lm = LanguageModel(model.to(device).train(), byte_tokenizer(), TaskConfig())
    own = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # by address; kept, so that none is used again
    inputs: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    first = decoder_layers(model)
    if first is not None:
        first[0].register_forward_pre_hook(lambda module, states: inputs.append(states[0].nbytes))
    unit = [TokenizedExample([3 + place % 50 for place in range(tokens + 1)], [False] * tokens + [True])]
    autocast = torch.autocast(device, torch.bfloat16, enabled=train.precision == "autocast")
    with fuse_layers(lm), packed_attention(lm, tokens) as packs, set_dropout(lm, train.noise.dropout or None):
        inputs.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
            predicting_states(lm, pack([unit], device, padded=not packs))
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
    total = sum(storage.nbytes() for storage in saved.values())
    return scale * total, scale * matrices, scale * (inputs[0] if inputs else 0)


def _narrowed(config: Any, layers: int) -> tuple[Any, int]:
    """Returns a config with so many layers and sizes divided by the largest power of two, and that power."""
    small = change_config(config, _VOCABULARY)
    sizes = {key: getattr(config, name, None) for key, name in _SIZES.items()}
    known: dict[str, Any] = {key: size for key, size in sizes.items() if isinstance(size, int)}
    scale = 1
    # The routers of experts compare them by number.
    if "hidden" in known and not getattr(config, "num_experts_per_tok", None):
        while known["hidden"] >= 2 * scale * _WIDTH and all(size % (2 * scale) == 0 for size in known.values()):
            scale *= 2
    with suppress(UserError):
        narrow = {key: size // scale for key, size in known.items()}
        return resized_config(small, "model", layers=layers, **narrow), scale
    return resized_config(small, "model", layers=layers), 1
