"""Attention over several sequences in one row: each token sees its own piece up to itself, and the pieces before it.

A row holds pieces one after another without padding, so that linear layers compute nothing in vain. A piece may go on
from another (a shared prompt stands once in the row): it sees that one, and what that goes on from, whole. Only here
are pieces of similar length put side by side and padded.
"""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.models import varlen
from posttrain.models.causal import causal_attention
from posttrain.models.row_plan import Group, Plan

NAME = "posttrain_packed"
_REFUSED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")  # what models call theirs with


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention.

    Args:
        query: [1, H, T, D].
        key, value: [1, H or a divisor of it, T, D].
        options: ``pieces``, the row's `Plan`, as it was given to the model's forward.

    Returns:
        [1, T, H, D].

    Raises:
        ValueError: the model caps or biases its attention scores, has sinks or sees some keys only, or its values are
            not as wide as its keys, which this attention is not for: `packing` has its rows padded.
    """
    for name in _REFUSED:
        if options.get(name) is not None:
            raise ValueError(f"attention with {name}")
    if value.shape[-1] != key.shape[-1]:
        raise ValueError("values that are not as wide as keys")
    row: Plan = options["pieces"]
    scale = scaling or query.shape[-1] ** -0.5
    # Under autocast rotated queries and keys are float32, values are not.
    q, k, v = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))  # [T, H, D]
    if row.spans is not None and varlen.runs_on(q, dropout):
        if (keys := row.spans.keys) is not None:
            k, v = (_Repeated.apply(states, keys)[0] for states in (k, v))  # type: ignore[no-untyped-call]
        return varlen.span_attention(q, k, v, row.spans, scale)[None], None
    sizes = [group.queries.numel() for group in row.groups]
    # Split, not sliced: the gradient of each slice would be as long as the row.
    own = [_Rearranged.apply(states, row.order, row.places, None).split(sizes) for states in (q, k, v)]  # type: ignore[no-untyped-call]
    found = [
        _attend_group(group, mine, k, v, scale, dropout)
        for group, mine in zip(row.groups, zip(*own, strict=True), strict=True)
    ]
    output: Tensor = _Rearranged.apply(torch.cat(found), row.places, row.order, row.real)  # type: ignore[no-untyped-call]
    return output[None], None


def register() -> None:
    """Make the attention known to transformers under `NAME`; no mask is made for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def _attend_group(
    group: Group, own: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, scale: float, dropout: float
) -> Tensor:
    """Attention of a group's tokens over their own keys and those of the row that stand before: [N * Q, H, D].

    Args:
        own: queries, keys and values of the group's tokens, [N * Q, H or Hk, D].
        keys, values: of the whole row, [T, Hk, D].
    """
    query, key, value = own
    number, width = group.queries.shape
    heads, (shared, size) = query.shape[1], key.shape[1:]
    q = query.view(number, width, shared, heads // shared, size).transpose(1, 2)  # [N, Hk, Q, G, D]
    k, v = (states.view(number, width, shared, size) for states in (key, value))
    if group.before.shape[1]:
        k = torch.cat([_Repeated.apply(keys, group.before), k], 1)  # type: ignore[no-untyped-call]
        v = torch.cat([_Repeated.apply(values, group.before), v], 1)  # type: ignore[no-untyped-call]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [N, Hk, P + Q, D]
    if query.device.type == "cpu" and not dropout:
        hidden = None if group.hidden is None else group.hidden.repeat_interleave(shared, 0)
        found = causal_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale, hidden)
        return found.view(number, shared, width, heads // shared, size).transpose(1, 2).reshape(-1, heads, size)
    found = functional.scaled_dot_product_attention(
        q.permute(0, 1, 3, 2, 4).flatten(1, 2),
        k,
        v,
        attn_mask=_mask(group, query.device),
        dropout_p=dropout,
        scale=scale,
        enable_gqa=heads != shared,
    )
    return found.transpose(1, 2).flatten(0, 1)


class _Rearranged(torch.autograd.Function):
    """Rows of a tensor in another order; the other index leads back, so that nothing has to be added up."""

    @staticmethod
    def forward(context: Any, states: Tensor, index: Tensor, back: Tensor, real: Tensor | None) -> Tensor:
        context.save_for_backward(back, real)
        return states.index_select(0, index)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        back, real = context.saved_tensors
        found = gradient.index_select(0, back)
        return found if real is None else found.mul_(real[..., None]), None, None, None


class _Repeated(torch.autograd.Function):
    """Rows of a tensor [T, ...] by an index [N, P] that may name them many times; gradients are added in float32."""

    @staticmethod
    def forward(context: Any, states: Tensor, index: Tensor) -> Tensor:
        context.save_for_backward(index)
        context.shape = states.shape
        return states.index_select(0, index.flatten()).view(*index.shape, *states.shape[1:])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        (index,) = context.saved_tensors
        total = torch.zeros(context.shape, dtype=torch.float32, device=gradient.device)
        total.index_add_(0, index.flatten(), gradient.flatten(0, 1).float())
        return total.to(gradient.dtype), None


def _mask(group: Group, device: torch.device) -> Tensor:
    """bool [N, 1, Q, P + Q]: who sees whom."""
    number, width = group.queries.shape
    seen = torch.ones(number, width, group.before.shape[1], dtype=torch.bool, device=device)
    if group.hidden is not None:
        seen &= ~group.hidden[:, None]
    own = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(number, -1, -1)
    return torch.cat([seen, own], 2)[:, None]
