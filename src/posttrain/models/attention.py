"""Attention over several sequences in one row: each token sees its own piece up to itself, and the pieces before it.

A row holds pieces one after another without padding, so that linear layers compute nothing in vain. A piece may go on
from another (a shared prompt stands once in the row): it sees that one, and what that goes on from, whole. Only here
are pieces of similar length put side by side and padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.models import varlen
from posttrain.models.causal import causal_attention

NAME = "posttrain_packed"
_PADDED_SHARE = 0.1  # of a group's queries may be padding
_PADDED = 128  # queries that cost no more than another group


@dataclass(frozen=True)
class Piece:
    """A run of tokens in a row.

    Args:
        start: where it begins in the row.
        length: its tokens.
        parent: number of the piece that it goes on from, which stands before it; None where a sequence begins.
    """

    start: int
    length: int
    parent: int | None = None


@dataclass(frozen=True)
class Group:
    """N pieces of at most Q tokens that are computed side by side.

    Args:
        queries: int64 [N, Q], places of their tokens in the row; 0 where there is padding.
        before: int64 [N, P], places of what they go on from; 0 where there is padding, which comes first.
        hidden: bool [N, P], where that is; None where there is none.
    """

    queries: Tensor
    before: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class Plan:
    """How attention over one row of T tokens is computed.

    Args:
        groups: all pieces, by length.
        order: int64 [A], the groups' queries one after another.
        places: int64 [T], where each token of the row stands in ``order``.
        real: bool [A, 1], where ``order`` is no padding; None where there is none.
        spans: the same row for a kernel that takes all pieces at once; None where there is no such kernel.
    """

    groups: list[Group]
    order: Tensor
    places: Tensor
    real: Tensor | None
    spans: varlen.Spans | None = None


def plan(pieces: Sequence[Piece], device: torch.device | str = "cpu", *, one_group: bool = False) -> Plan:
    """Group the pieces of a row by length, so that little is padded, or all together."""
    before = _places_before(pieces)
    together: list[list[int]] = []
    for index in sorted(range(len(pieces)), key=lambda index: (pieces[index].length, len(before[index]))):
        if not together or not (one_group or _fits(together[-1], index, pieces)):
            together.append([])
        together[-1].append(index)
    groups = [_group([pieces[i] for i in members], [before[i] for i in members]) for members in together]
    order = torch.cat([group.queries.flatten() for group in groups])
    real = torch.cat(
        [
            torch.arange(group.queries.shape[1]) < torch.tensor([pieces[index].length])
            for group, members in zip(groups, together, strict=True)
            for index in members
        ]
    )
    places = torch.empty(int(real.sum()), dtype=torch.long)
    places[order[real]] = real.nonzero()[:, 0]
    return Plan(
        [_moved(group, device) for group in groups],
        order.to(device),
        places.to(device),
        None if bool(real.all()) else real[:, None].to(device),
        _spans(pieces, before, device) if torch.device(device).type == "cuda" else None,
    )


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
        ValueError: the model caps its attention scores, which this attention is not for: `packing` has its rows padded.
    """
    if options.get("softcap"):
        raise ValueError("capped attention scores")
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
        return found.view(number, shared, width, -1, size).transpose(1, 2).reshape(-1, heads, size)
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


def _places_before(pieces: Sequence[Piece]) -> list[list[int]]:
    """For each piece the places in the row of all that it goes on from."""
    before: list[list[int]] = []
    for piece in pieces:
        if piece.parent is None:
            before.append([])
        else:
            parent = pieces[piece.parent]
            before.append([*before[piece.parent], *range(parent.start, parent.start + parent.length)])
    return before


def _spans(pieces: Sequence[Piece], before: Sequence[list[int]], device: torch.device | str) -> varlen.Spans:
    return varlen.spans([range(piece.start, piece.start + piece.length) for piece in pieces], before, device)


def _fits(group: list[int], index: int, pieces: Sequence[Piece]) -> bool:
    """Whether a group stays nearly without padding when a longer piece joins it."""
    area = (len(group) + 1) * pieces[index].length
    padding = area - sum(pieces[member].length for member in group) - pieces[index].length
    return padding <= max(_PADDED, _PADDED_SHARE * area)


def _group(pieces: list[Piece], before: list[list[int]]) -> Group:
    width, seen = max(piece.length for piece in pieces), max(len(places) for places in before)
    queries = torch.zeros(len(pieces), width, dtype=torch.long)
    others = torch.zeros(len(pieces), seen, dtype=torch.long)
    hidden = torch.ones(len(pieces), seen, dtype=torch.bool)
    for row, (piece, places) in enumerate(zip(pieces, before, strict=True)):
        queries[row, : piece.length] = torch.arange(piece.start, piece.start + piece.length)
        others[row, seen - len(places) :] = torch.tensor(places, dtype=torch.long)
        hidden[row, seen - len(places) :] = False
    return Group(queries, others, hidden if bool(hidden.any()) else None)


def _moved(group: Group, device: torch.device | str) -> Group:
    hidden = None if group.hidden is None else group.hidden.to(device)
    return Group(group.queries.to(device), group.before.to(device), hidden)
