"""Causal attention of short sequences side by side, forwards and backwards, a tile of scores at a time.

For sequences of up to a thousand tokens the score matrices of a few heads fit a processor's cache, and plain matrix
products over them beat the fused kernels that torch has for CPUs. Of long sequences nothing but the inputs is kept for
the backward pass, and scores are computed again (Dao et al. 2022, arXiv:2205.14135, section 3.1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import torch
from torch import Tensor

_SCORES = 1 << 20  # in a tile
_QUERIES = 256  # in a tile, of each sequence: longer sequences leave out most of what no query sees
_KEPT = 6  # keys for each number of a head


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
        """Where the tile is in [M, Q * G, ...]."""
        return self.rows, slice(self.first * self.heads, self.last * self.heads)


def keeps_scores(keys: int, size: int) -> bool:
    """Whether what sequences of so many keys, heads of this size, take of each key is kept for the backward pass.

    That of short ones is, as it is no more than a few times their queries.
    """
    return keys <= _KEPT * size


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
        found = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # contiguous, so that rows are its own
        rows, kept = found.flatten(1, 2), []
        for tile in _tiles(query, key):
            probabilities = _probabilities(query, key, hidden, tile, scale)
            rows[tile.at] = torch.bmm(probabilities, value[tile.rows, : tile.seen])
            if keeps_scores(key.shape[1], key.shape[2]):
                kept.append(probabilities)
        context.save_for_backward(query, key, value, hidden, *kept)
        context.scale = scale
        return found

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        query, key, value, hidden, *kept = context.saved_tensors
        of_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        rows, above = of_query.flatten(1, 2), gradient.flatten(1, 2)
        tiles = list(_tiles(query, key))
        once = all(tile.whole for tile in tiles)
        # Where the queries of a sequence stand in several tiles, the gradients of its keys are added up in float32.
        dtype = key.dtype if once else torch.float32
        begun = torch.empty if once else torch.zeros
        of_key, of_value = (begun(states.shape, dtype=dtype, device=key.device) for states in (key, value))
        for number, tile in enumerate(tiles):
            probabilities = kept[number] if kept else _probabilities(query, key, hidden, tile, context.scale)
            keys, part, asked = (tile.rows, slice(tile.seen)), above[tile.at], query.flatten(1, 2)[tile.at]
            found = torch.bmm(probabilities.transpose(1, 2), part)
            _add(of_value[keys], found, once)
            of_probabilities = torch.bmm(part, value[keys].transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_probabilities, probabilities, -1, probabilities.dtype)
            rows[tile.at] = torch.bmm(of_scores, key[keys])
            found = torch.bmm(of_scores.transpose(1, 2), asked)
            _add(of_key[keys], found, once)
        of_query, of_key = of_query.mul_(context.scale), of_key.mul_(context.scale)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _add(total: Tensor, found: Tensor, once: bool) -> None:
    if once:
        total.copy_(found)
    else:
        total += found


def _tiles(query: Tensor, key: Tensor) -> Iterator[_Tile]:
    sequences, queries, heads, _ = query.shape
    before = key.shape[1] - queries
    for first in range(0, queries, _QUERIES):
        last = min(queries, first + _QUERIES)
        number = ceil(sequences * (last - first) * heads * (before + last) / _SCORES)
        together = ceil(sequences / number)
        for start in range(0, sequences, together):
            yield _Tile(slice(start, start + together), first, last, heads, before + last, last - first == queries)


def _probabilities(query: Tensor, key: Tensor, hidden: Tensor | None, tile: _Tile, scale: float) -> Tensor:
    """How much of each key a tile's queries take: [m, q * G, k]."""
    asked, keys = query.flatten(1, 2)[tile.at], key[tile.rows, : tile.seen].transpose(1, 2)
    before, own = key.shape[1] - query.shape[1], tile.last - tile.first
    scores = asked.new_empty(*asked.shape[:2], tile.seen)
    scores[..., : tile.seen - own] = 0
    scores[..., tile.seen - own :] = _later(tile.heads, asked.dtype, asked.device)[: asked.shape[1], :own]
    if hidden is not None:
        scores[..., :before].masked_fill_(hidden[tile.rows, None], torch.finfo(scores.dtype).min)
    return torch.softmax(scores.baddbmm_(asked, keys, alpha=scale), -1)


@lru_cache(16)
def _later(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to a tile's scores of its queries' own keys: [q * heads, q], of fewer queries the upper left.

    The lowest number where a key comes after its query, else 0.
    """
    own = torch.full((_QUERIES, _QUERIES), torch.finfo(dtype).min, dtype=dtype, device=device).triu_(1)
    return own.repeat_interleave(heads, 0)
