"""Causal attention of short sequences side by side, forwards and backwards, a tile of scores at a time.

For sequences of up to a thousand tokens the score matrices of a few heads fit a processor's cache, and plain matrix
products over them beat the fused kernels that torch has for CPUs. Nothing but the inputs is kept for the backward
pass; scores are computed again (Dao et al. 2022, arXiv:2205.14135, section 3.1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_SCORES = 1 << 20  # in a tile
_QUERIES = 256  # in a tile, of each sequence: longer sequences leave out most of what no query sees


@dataclass(frozen=True)
class _Tile:
    """Sequences and queries that are computed together."""

    rows: slice
    queries: slice


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    """Softmax attention in which query i sees the first K - Q + i + 1 keys.

    Args:
        query: [M, Q, G, D]; M is sequences times key heads, G the query heads that share a key head.
        key, value: [M, K, D], K at least Q.
        scale: of the scores.
        hidden: bool [M, K - Q], keys before the first query's own that nobody sees; None where all are seen.

    Returns:
        [M, Q, G, D].
    """
    found: Tensor = _CausalAttention.apply(query, key, value, scale, hidden)  # type: ignore[no-untyped-call]
    return found


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
        query = query * scale
        found = torch.empty_like(query)
        for tile in _tiles(query, key):
            _, probabilities = _probabilities(query, key, hidden, tile)
            seen = value[tile.rows, : probabilities.shape[2]]
            part = found[tile.rows, tile.queries]
            part.copy_(torch.bmm(probabilities, seen).view(part.shape))
        context.save_for_backward(query, key, value, hidden)
        context.scale = scale
        return found

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        query, key, value, hidden = context.saved_tensors
        of_query = torch.empty_like(query)
        of_key, of_value = (
            torch.zeros(states.shape, dtype=torch.float32, device=key.device) for states in (key, value)
        )
        for tile in _tiles(query, key):
            asked, probabilities = _probabilities(query, key, hidden, tile)
            keys = slice(0, probabilities.shape[2])
            above = gradient[tile.rows, tile.queries].reshape(asked.shape)
            of_value[tile.rows, keys] += torch.bmm(probabilities.transpose(1, 2), above)
            of_probabilities = torch.bmm(above, value[tile.rows, keys].transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_probabilities, probabilities, -1, probabilities.dtype)
            part = of_query[tile.rows, tile.queries]
            part.copy_(torch.bmm(of_scores, key[tile.rows, keys]).view(part.shape))
            of_key[tile.rows, keys] += torch.bmm(of_scores.transpose(1, 2), asked)
        return of_query.mul_(context.scale), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _tiles(query: Tensor, key: Tensor) -> Iterator[_Tile]:
    sequences, queries, heads, _ = query.shape
    before = key.shape[1] - queries
    for first in range(0, queries, _QUERIES):
        last = min(queries, first + _QUERIES)
        together = max(1, _SCORES // ((last - first) * heads * (before + last)))
        for start in range(0, sequences, together):
            yield _Tile(slice(start, start + together), slice(first, last))


def _probabilities(query: Tensor, key: Tensor, hidden: Tensor | None, tile: _Tile) -> tuple[Tensor, Tensor]:
    """A tile's queries [m, q * G, D], and how much of each key they take: [m, q * G, k]."""
    part = query[tile.rows, tile.queries]
    sequences, count, heads, width = part.shape
    before = key.shape[1] - query.shape[1]
    asked = part.reshape(sequences, count * heads, width)
    scores = torch.bmm(asked, key[tile.rows, : before + tile.queries.stop].transpose(1, 2))
    by_query = scores.view(sequences, count, heads, -1)
    lowest = torch.finfo(scores.dtype).min
    by_query[..., before + tile.queries.start :] += _later(count, scores.dtype, scores.device)[:, None]
    if hidden is not None:
        by_query[..., :before].masked_fill_(hidden[tile.rows, None, None], lowest)
    return asked, torch.softmax(scores, -1)


@lru_cache(64)
def _later(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The lowest number where a key comes after its query, else 0: [count, count]."""
    return torch.full((count, count), torch.finfo(dtype).min, dtype=dtype, device=device).triu_(1)
