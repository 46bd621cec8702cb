"""The axes of a decoder's tensors: which of their rows and columns belong to one hidden unit, head or channel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.merge.sources import WeightSource
from posttrain.store.errors import UserError, shorten

RESIDUAL, INNER, QUERIES, KEYS, VALUES, ATTENDED = "residual", "inner", "queries", "keys", "values", "attended"
"""Channels of the residual stream; units of a feed-forward block; and a layer's queries, keys, values and the heads'
outputs, which are the columns of its output projection."""

HEAD_SIZE, VOCABULARY = "head size", "vocabulary"

_IN_LAYER = {
    "self_attn.q_proj.weight": (QUERIES, RESIDUAL),
    "self_attn.k_proj.weight": (KEYS, RESIDUAL),
    "self_attn.v_proj.weight": (VALUES, RESIDUAL),
    "self_attn.o_proj.weight": (RESIDUAL, ATTENDED),
    "self_attn.q_proj.bias": (QUERIES,),
    "self_attn.k_proj.bias": (KEYS,),
    "self_attn.v_proj.bias": (VALUES,),
    "self_attn.o_proj.bias": (RESIDUAL,),
    # One norm for all heads: it moves nothing, as channels inside a head keep their order.
    "self_attn.q_norm.weight": (HEAD_SIZE,),
    "self_attn.k_norm.weight": (HEAD_SIZE,),
    "mlp.gate_proj.weight": (INNER, RESIDUAL),
    "mlp.up_proj.weight": (INNER, RESIDUAL),
    "mlp.down_proj.weight": (RESIDUAL, INNER),
    "mlp.gate_proj.bias": (INNER,),
    "mlp.up_proj.bias": (INNER,),
    "mlp.down_proj.bias": (RESIDUAL,),
    "input_layernorm.weight": (RESIDUAL,),
    "post_attention_layernorm.weight": (RESIDUAL,),
    "pre_feedforward_layernorm.weight": (RESIDUAL,),
    "post_feedforward_layernorm.weight": (RESIDUAL,),
}

_OUTSIDE = {
    "model.embed_tokens.weight": (VOCABULARY, RESIDUAL),
    "model.norm.weight": (RESIDUAL,),
    "lm_head.weight": (VOCABULARY, RESIDUAL),
}


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of a decoder's layers.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads; head i reads that of number i // (heads // kv_heads).
        size: width of a head.
    """

    heads: int
    kv_heads: int
    size: int

    @property
    def shared(self) -> int:
        """Returns the number of query heads that read one key and value head."""
        return self.heads // self.kv_heads


def attention_heads(config: Mapping[str, Any]) -> AttentionHeads | None:
    """Returns the heads by a model's ``config.json``; None if it does not say them."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return None
    kv_heads = config.get("num_key_value_heads") or heads
    return AttentionHeads(heads, kv_heads, config.get("head_dim") or width // heads)


def axes_of(tensor: str) -> tuple[str, ...] | None:
    """Returns the axis of each dimension of a Llama-like decoder's tensor; None if the name is another family's."""
    if tensor in _OUTSIDE:
        return _OUTSIDE[tensor]
    prefix, _, rest = tensor.partition(".layers.")
    number, _, name = rest.partition(".")
    return _IN_LAYER.get(name) if prefix == "model" and number.isdigit() else None


def check_axes(source: WeightSource, fix: str) -> AttentionHeads:
    """Checks that the axes of all tensors of a model are known, and of the size that they should have.

    Args:
        source: the model.
        fix: what to do otherwise.

    Returns:
        The model's heads.

    Raises:
        UserError: the model is of another family than Llama, Mistral, Qwen 2 and 3, SmolLM and their kin.
    """
    heads = attention_heads(source.config)
    if heads is None:
        raise UserError("config.json does not say the attention heads", where=source.name, fix=fix)
    sizes = {
        RESIDUAL: source.config["hidden_size"],
        QUERIES: heads.heads * heads.size,
        KEYS: heads.kv_heads * heads.size,
        VALUES: heads.kv_heads * heads.size,
        ATTENDED: heads.heads * heads.size,
        HEAD_SIZE: heads.size,
    }
    for tensor, shape in source.shapes().items():
        axes = axes_of(tensor)
        known = axes is not None and len(axes) == len(shape)
        if not known or any(size != sizes.get(axis, size) for axis, size in zip(axes or (), shape, strict=True)):
            what = f"the units of tensor {shorten(tensor)} are not known: the model is not a Llama-like decoder"
            raise UserError(what, where=source.name, fix=fix)
    return heads
