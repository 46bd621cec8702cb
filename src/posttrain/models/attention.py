"""Attention over several sequences packed in one row, with a kernel for CPUs and one for CUDA devices.

A row holds segments one after another without padding, so that linear layers compute nothing in vain. Each token
attends to its own segment up to itself, and to all of the segments that this one continues (a shared prompt stands once
in the row). Only here are segments of similar length put side by side and padded.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.models.attention_plan import AttentionPlan, SegmentGroup, VarlenSpans

PACKED_ATTENTION = "posttrain_packed"

_UNSUPPORTED = (
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "indices",
    "block_indices",
)  # what models call theirs with

_TILE_SCORES = 1 << 20  # in a tile

_TILE_QUERIES = 256  # in a tile, of each sequence: longer sequences leave out most of what no query sees

_MAX_KEYS_PER_SIZE = 6  # keys for each number of a head

_MAX_HEAD_SIZE = 256


def packed_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes packed attention; transformers calls it in place of its own.

    Args:
        query: [1, H, T, D].
        key, value: [1, H or a divisor of it, T, D].
        options: ``plan``, the row's `AttentionPlan`, as it was given to the model's forward.

    Returns:
        [1, T, H, D].

    Raises:
        ValueError: the model caps or biases its attention scores, has sinks or sees some keys only, or its values are
            not as wide as its keys, which this attention is not for: `packing` has its rows padded.
    """
    # Ignoring such an option would train the model with another attention than the one it runs with.
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"attention with {name}")
    if value.shape[-1] != key.shape[-1]:
        raise ValueError("values that are not as wide as keys")
    # The plan comes by keyword through the whole model: transformers hands unknown ones on to its attention.
    row: AttentionPlan = options["plan"]
    scale = scaling or query.shape[-1] ** -0.5
    # Under autocast rotated queries and keys are float32, values are not.
    q, k, v = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))  # [T, H, D]
    # One kernel call for all segments; the groups below are for devices and dtypes without such a kernel.
    if row.spans is not None and has_varlen_kernel(q, dropout):
        if (keys := row.spans.keys) is not None:
            k, v = (_Gather.apply(states, keys)[0] for states in (k, v))  # type: ignore[no-untyped-call]
        return varlen_attention(q, k, v, row.spans, scale)[None], None
    sizes = [group.queries.numel() for group in row.groups]
    # Split, not sliced: the gradient of each slice would be as long as the row.
    own = [_Permute.apply(states, row.order, row.inverse, None).split(sizes) for states in (q, k, v)]  # type: ignore[no-untyped-call]
    outputs = [
        _attend_group(group, group_states, k, v, scale, dropout)
        for group, group_states in zip(row.groups, zip(*own, strict=True), strict=True)
    ]
    output: Tensor = _Permute.apply(torch.cat(outputs), row.inverse, row.order, row.real)  # type: ignore[no-untyped-call]
    return output[None], None


def register_packed_attention() -> None:
    """Makes the attention known to transformers under `PACKED_ATTENTION`; no mask is made for it."""
    from transformers import AttentionInterface

    # The compiler would trace a graph again for each plan, as its groups differ from batch to batch.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention_forward))  # type: ignore[no-untyped-call]


def _attend_group(
    group: SegmentGroup, own: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, scale: float, dropout: float
) -> Tensor:
    """Attention of a group's tokens over their own keys and those of the row that stand before: [N * Q, H, D].

    Args:
        own: queries, keys and values of the group's tokens, [N * Q, H or Hk, D].
        keys, values: those of the whole row, [T, Hk, D].
    """
    query, key, value = own
    number, width = group.queries.shape
    heads, (shared, size) = query.shape[1], key.shape[1:]
    q = query.view(number, width, shared, heads // shared, size).transpose(1, 2)  # [N, Hk, Q, G, D]
    k, v = (states.view(number, width, shared, size) for states in (key, value))
    # A prefix that many segments share stands once in the row, so its keys are copied to each of them here.
    if group.before.shape[1]:
        k = torch.cat([_Gather.apply(keys, group.before), k], 1)  # type: ignore[no-untyped-call]
        v = torch.cat([_Gather.apply(values, group.before), v], 1)  # type: ignore[no-untyped-call]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [N, Hk, P + Q, D]
    # Our own kernel has no dropout; torch's does, and takes a mask.
    if query.device.type == "cpu" and not dropout:
        hidden = None if group.hidden is None else group.hidden.repeat_interleave(shared, 0)
        output = causal_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale, hidden)
        return output.view(number, shared, width, heads // shared, size).transpose(1, 2).reshape(-1, heads, size)
    output = functional.scaled_dot_product_attention(
        q.permute(0, 1, 3, 2, 4).flatten(1, 2),
        k,
        v,
        attn_mask=_group_mask(group, query.device),
        dropout_p=dropout,
        scale=scale,
        enable_gqa=heads != shared,
    )
    return output.transpose(1, 2).flatten(0, 1)


class _Permute(torch.autograd.Function):
    """Rows of a tensor in another order; the other index leads back, so that nothing has to be added up."""

    @staticmethod
    def forward(context: Any, states: Tensor, index: Tensor, back: Tensor, real: Tensor | None) -> Tensor:
        context.save_for_backward(back, real)
        return states.index_select(0, index)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        back, real = context.saved_tensors
        permuted = gradient.index_select(0, back)
        return permuted if real is None else permuted.mul_(real[..., None]), None, None, None


class _Gather(torch.autograd.Function):
    """Rows of a tensor [T, ...] by an index [N, P] that may name them many times; gradients are added in float32."""

    @staticmethod
    def forward(context: Any, states: Tensor, index: Tensor) -> Tensor:
        context.save_for_backward(index)
        context.shape = states.shape
        return states.index_select(0, index.flatten()).view(*index.shape, *states.shape[1:])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        (index,) = context.saved_tensors
        # Thousands of segments may add to one shared prompt: in bfloat16 the sum would stop growing after 256 of them.
        total = torch.zeros(context.shape, dtype=torch.float32, device=gradient.device)
        total.index_add_(0, index.flatten(), gradient.flatten(0, 1).float())
        return total.to(gradient.dtype), None


def _group_mask(group: SegmentGroup, device: torch.device) -> Tensor:
    """bool [N, 1, Q, P + Q]: who sees whom."""
    number, width = group.queries.shape
    seen = torch.ones(number, width, group.before.shape[1], dtype=torch.bool, device=device)
    if group.hidden is not None:
        seen &= ~group.hidden[:, None]
    # Padding stands after a segment's tokens, so the causal part hides it from all of them already.
    own = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(number, -1, -1)
    return torch.cat([seen, own], 2)[:, None]


@dataclass(frozen=True)
class _Tile:
    """Sequences and queries that are computed together.

    Args:
        rows: the sequences.
        first, last: their queries.
        heads: query heads that share a key head.
        seen: how many keys the last query sees.
        whole: whether these are all queries.
    """

    rows: slice
    first: int
    last: int
    heads: int
    seen: int
    whole: bool

    @property
    def at(self) -> tuple[slice, slice]:
        """The slices of the tile in [M, Q * G, ...]."""
        return self.rows, slice(self.first * self.heads, self.last * self.heads)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    """Computes softmax attention in which query i sees the first K - Q + i + 1 keys, a tile of scores at a time.

    For sequences of up to a thousand tokens the score matrices of a few heads fit a processor's cache, and plain matrix
    products over them beat the fused kernels that torch has for CPUs. Of long sequences nothing but the inputs is kept
    for the backward pass, and scores are computed again (Dao et al. 2022, arXiv:2205.14135, section 3.1).

    Args:
        query: [M, Q, G, D]; M is sequences times key heads, G the query heads that share a key head.
        key, value: [M, K, D], K at least Q.
        scale: factor on the scores.
        hidden: bool [M, K - Q], keys before the first query's own that nobody sees; None where all are seen.

    Returns:
        [M, Q, G, D].
    """
    output: Tensor = _CausalAttention.apply(query, key, value, scale, hidden)  # type: ignore[no-untyped-call]
    return output


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
        output = torch.empty(
            query.shape, dtype=query.dtype, device=query.device
        )  # contiguous, so that rows are its own
        rows, saved = output.flatten(1, 2), []
        for tile in _tiles(query, key):
            probabilities = _probabilities(query, key, hidden, tile, scale)
            rows[tile.at] = torch.bmm(probabilities, value[tile.rows, : tile.seen])
            # Those of short sequences are kept, as they are only a few times their queries.
            if key.shape[1] <= _MAX_KEYS_PER_SIZE * key.shape[2]:
                saved.append(probabilities)
        context.save_for_backward(query, key, value, hidden, *saved)
        context.scale = scale
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        query, key, value, hidden, *saved = context.saved_tensors
        of_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        rows, above = of_query.flatten(1, 2), gradient.flatten(1, 2)
        tiles = list(_tiles(query, key))
        once = all(tile.whole for tile in tiles)
        # Where the queries of a sequence stand in several tiles, the gradients of its keys are added up in float32.
        dtype = key.dtype if once else torch.float32
        begun = torch.empty if once else torch.zeros
        of_key, of_value = (begun(states.shape, dtype=dtype, device=key.device) for states in (key, value))
        for number, tile in enumerate(tiles):
            probabilities = saved[number] if saved else _probabilities(query, key, hidden, tile, context.scale)
            # A tile's queries see no key after its last query: those products are left out, half of all in a long
            # sequence.
            keys, part, tile_queries = (tile.rows, slice(tile.seen)), above[tile.at], query.flatten(1, 2)[tile.at]
            output = torch.bmm(probabilities.transpose(1, 2), part)
            _add_gradient(of_value[keys], output, once)
            of_probabilities = torch.bmm(part, value[keys].transpose(1, 2))
            # The same call that autograd makes for a softmax: one pass, where p (g - sum p g) written out takes three.
            of_scores = torch._softmax_backward_data(of_probabilities, probabilities, -1, probabilities.dtype)
            rows[tile.at] = torch.bmm(of_scores, key[keys])
            output = torch.bmm(of_scores.transpose(1, 2), tile_queries)
            _add_gradient(of_key[keys], output, once)
        of_query, of_key = of_query.mul_(context.scale), of_key.mul_(context.scale)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _add_gradient(total: Tensor, gradient: Tensor, once: bool) -> None:
    if once:
        total.copy_(gradient)
    else:
        total += gradient


def _tiles(query: Tensor, key: Tensor) -> Iterator[_Tile]:
    sequences, queries, heads, _ = query.shape
    before = key.shape[1] - queries
    for first in range(0, queries, _TILE_QUERIES):
        last = min(queries, first + _TILE_QUERIES)
        # As many parts as bring a tile's scores below the size of a cache, then as even as can be.
        number = ceil(sequences * (last - first) * heads * (before + last) / _TILE_SCORES)
        together = ceil(sequences / number)
        for start in range(0, sequences, together):
            yield _Tile(slice(start, start + together), first, last, heads, before + last, last - first == queries)


def _probabilities(query: Tensor, key: Tensor, hidden: Tensor | None, tile: _Tile, scale: float) -> Tensor:
    """Computes the attention probabilities of a tile's queries: [m, q * G, k]."""
    queries, keys = query.flatten(1, 2)[tile.at], key[tile.rows, : tile.seen].transpose(1, 2)
    before, own = key.shape[1] - query.shape[1], tile.last - tile.first
    scores = queries.new_empty(*queries.shape[:2], tile.seen)
    # `baddbmm_` adds the product to what the scores hold, so they start as the mask: no second pass over a tile.
    scores[..., : tile.seen - own] = 0
    scores[..., tile.seen - own :] = _causal_mask(tile.heads, queries.dtype, queries.device)[: queries.shape[1], :own]
    if hidden is not None:
        scores[..., :before].masked_fill_(hidden[tile.rows, None], torch.finfo(scores.dtype).min)
    return torch.softmax(scores.baddbmm_(queries, keys, alpha=scale), -1)


@lru_cache(16)
def _causal_mask(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the causal mask that is added to a tile's scores: [q * heads, q]; fewer queries take the upper left.

    The lowest number where a key comes after its query, else 0.
    """
    # Every tile of a training takes the same mask, hence the cache.
    own = torch.full((_TILE_QUERIES, _TILE_QUERIES), torch.finfo(dtype).min, dtype=dtype, device=device).triu_(1)
    return own.repeat_interleave(heads, 0)


def has_varlen_kernel(query: Tensor, dropout: float) -> bool:
    """Returns whether there is a kernel for queries [T, H, D] of this kind; it has no dropout and no float32."""
    return (
        query.is_cuda
        and not dropout
        and query.dtype in (torch.bfloat16, torch.float16)
        # FlashAttention loads heads in vectors of 8 numbers.
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= _MAX_HEAD_SIZE
        and _torch_has_varlen(query.device)
    )


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, spans: VarlenSpans, scale: float) -> Tensor:
    """Softmax attention of each segment's queries over its keys.

    Args:
        query: [T, H, D].
        key, value: [A, H or a divisor of it, D], in the order of ``spans.keys``.
        scale: factor on the scores.

    Returns:
        [T, H, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 has no such argument: its kernel shares key heads among query heads without being asked.
    knows_sharing = "enable_gqa" in _varlen_parameters()
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if knows_sharing else {}
    output = varlen_attn(
        query,
        key,
        value,
        spans.query_starts,
        spans.key_starts,
        spans.most_queries,
        spans.most_keys,
        scale=scale,
        window_size=(-1, 0),  # causal, aligned with the last query and the last key
        **options,
    )
    assert isinstance(output, Tensor)
    return output


@lru_cache
def _torch_has_varlen(device: torch.device) -> bool:
    # The first versions knew no windows.
    knows = "window_size" in _varlen_parameters()
    return knows and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _varlen_parameters() -> frozenset[str]:
    """Returns the names of the parameters of torch's kernel; none where this torch has no such kernel."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
