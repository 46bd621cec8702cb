"""Removes layers, attention heads and feed-forward channels from a model; what is left is an ordinary, smaller one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.models.importance import ActivationImportance
from posttrain.models.shape import LAYER_LISTS, change_config, decoder_layers
from posttrain.store.errors import UserError

FAMILIES = frozenset(
    ("gemma", "gemma2", "gemma3_text", "granite", "llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3")
)
"""Values of ``model_type``: in these each head and each channel is a block of rows and columns of its layer's matrices
that nothing else depends on, and the config can name the smaller model. Tests compare each with a masked model."""


@dataclass(frozen=True)
class PrunedSize:
    """The numbers of parts that a model keeps; None: all.

    Attributes:
        layers: decoder layers.
        heads: query heads of each layer.
        inner: channels of each feed-forward block.
    """

    layers: int | None = None
    heads: int | None = None
    inner: int | None = None


@dataclass(frozen=True)
class KeptParts:
    """The parts that a model keeps, by their numbers from 0, ascending.

    Attributes:
        layers: decoder layers.
        groups: of each of these, the key and value heads, which are kept with all query heads that share them.
        inner: of each of these, the channels of the feed-forward block.
    """

    layers: list[int]
    groups: list[list[int]]
    inner: list[list[int]]


def check_pruning(config: Any, size: PrunedSize, where: str) -> Any:
    """Returns the config of the model that is left, as if the first layers were kept.

    Args:
        config: transformers config of the whole model.
        size: what to keep.
        where: config section of the size, named in errors.

    Raises:
        UserError: a model of this family cannot be pruned, or not to this size.
    """
    if config.get_text_config() is not config or config.model_type not in FAMILIES:
        families = ", ".join(sorted(FAMILIES))
        raise UserError(
            f"models of type {config.model_type} cannot be pruned", where=where, fix=f"take one of {families}"
        )
    for name, count, total in (
        ("layers", size.layers, config.num_hidden_layers),
        ("inner", size.inner, config.intermediate_size),
    ):
        if count is not None and not 1 <= count <= total:
            raise UserError(f"{count:,} cannot be kept", where=f"{where}.{name}", fix=f"the model has {total:,}")
    if size.heads is not None:
        _check_heads(config, size.heads, f"{where}.heads")
    return _pruned_config(config, size, range(size.layers or config.num_hidden_layers))


def choose_parts(importance: ActivationImportance, config: Any, size: PrunedSize) -> KeptParts:
    """Returns the most important parts, heads and channels by layer; of equal ones the first.

    A group's importance is the sum of its query heads'.
    """
    layers, heads = importance.heads.shape
    groups = _group_count(config)
    by_group = importance.heads.reshape(layers, groups, heads // groups).sum(2)
    kept_groups = groups if size.heads is None else size.heads * groups // heads
    kept = _greatest(importance.layers, size.layers)
    return KeptParts(
        kept,
        [_greatest(by_group[layer], kept_groups) for layer in kept],
        [_greatest(importance.inner[layer], size.inner) for layer in kept],
    )


@torch.no_grad()
def prune_model(model: Any, kept: KeptParts) -> None:
    """Removes all other parts from a transformers model of one of the `FAMILIES`.

    Its config becomes that of the smaller model. Modules may still read the one before: save the model and load it
    again before it is used.
    """
    config = model.config
    layers = decoder_layers(model)
    assert layers is not None, "its config was checked"
    group = config.num_attention_heads // _group_count(config)
    for number, groups, inner in zip(kept.layers, kept.groups, kept.inner, strict=True):
        layer: Any = layers[number]
        attention, block = layer.self_attn, layer.mlp
        keys, queries = _rows(groups, attention.head_dim), _rows(groups, attention.head_dim * group)
        for linear, rows in ((attention.q_proj, queries), (attention.k_proj, keys), (attention.v_proj, keys)):
            _keep_outputs(linear, rows)
        _keep_inputs(attention.o_proj, queries)
        for linear in (block.gate_proj, block.up_proj):
            _keep_outputs(linear, torch.tensor(inner))
        _keep_inputs(block.down_proj, torch.tensor(inner))
    size = PrunedSize(len(kept.layers), len(kept.groups[0]) * group, len(kept.inner[0]))
    model.config = _pruned_config(config, size, kept.layers)
    for number in sorted(set(range(len(layers))).difference(kept.layers), reverse=True):
        del layers[number]


def _pruned_config(config: Any, size: PrunedSize, layers: Sequence[int]) -> Any:
    changes: dict[str, Any] = {"num_hidden_layers": len(layers)}
    for name in LAYER_LISTS:
        if (values := getattr(config, name, None)) is not None:
            changes[name] = [values[layer] for layer in layers]
    if size.heads is not None:
        changes |= _head_changes(config, size.heads)
    if size.inner is not None:
        changes["intermediate_size"] = size.inner
    return change_config(config, changes)


def _head_changes(config: Any, heads: int) -> dict[str, Any]:
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = heads * _group_count(config) // config.num_attention_heads
    # The head size explicitly: without it a config implies one that grows as heads are removed.
    return {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_size}


def _check_heads(config: Any, heads: int, where: str) -> None:
    """Raises a UserError unless so many heads are whole groups, and a config of the family can name them."""
    total, groups = config.num_attention_heads, _group_count(config)
    if heads == total:
        return
    possible = [count for count in range(total // groups, total, total // groups) if _is_config(config, count)]
    if heads not in possible:
        fix = f"keep {', '.join(map(str, [*possible, total]))}: whole groups of heads that share a key and value head"
        raise UserError(f"{heads} of {total} heads cannot be kept", where=where, fix=fix)


def _is_config(config: Any, heads: int) -> bool:
    # Some families demand that the heads divide the hidden size, also where the head size is explicit.
    try:
        change_config(config, _head_changes(config, heads))
    except UserError:
        return False
    return True


def _group_count(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _greatest(scores: np.ndarray, count: int | None) -> list[int]:
    indices: list[int] = np.sort(np.argsort(-scores, kind="stable")[:count]).tolist()
    return indices


def _rows(groups: Sequence[int], width: int) -> Tensor:
    """Returns the rows of groups of a width each, int64 [groups * width]."""
    return (torch.tensor(groups)[:, None] * width + torch.arange(width)).flatten()


def _keep_outputs(linear: nn.Linear, rows: Tensor) -> None:
    if len(rows) < linear.out_features:
        linear.weight = nn.Parameter(linear.weight[rows.to(linear.weight.device)])
        if linear.bias is not None:
            linear.bias = nn.Parameter(linear.bias[rows.to(linear.bias.device)])
        linear.out_features = len(rows)


def _keep_inputs(linear: nn.Linear, columns: Tensor) -> None:
    if len(columns) < linear.in_features:
        linear.weight = nn.Parameter(linear.weight[:, columns.to(linear.weight.device)])
        linear.in_features = len(columns)
