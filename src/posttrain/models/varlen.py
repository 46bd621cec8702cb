"""Attention of all pieces of a row in one call of a kernel for sequences of varying length: the way of CUDA devices.

To the kernel (FlashAttention-2, Dao 2023, arXiv:2307.08691) each piece is a sequence whose queries are its own tokens,
and whose keys are the tokens that it goes on from and then its own. Of these a query sees all but those after it,
counted from the last one, so that what a piece goes on from is seen whole. Pairs of different pieces cost nothing.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

_LARGEST_HEAD = 256


@dataclass(frozen=True)
class Spans:
    """Where each of N pieces finds its queries and its keys.

    Args:
        keys: int64 [1, A], places in the row of the pieces' keys, one piece after another; None where the keys of each
            are its own tokens, which is the row as it is.
        query_starts: int32 [N + 1], where each piece's queries begin in the row, and where the last one's end.
        key_starts: int32 [N + 1], where its keys begin among all A keys, and where the last one's end.
        most_queries: of one piece.
        most_keys: of one piece.
    """

    keys: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int


def spans(own: Sequence[range], before: Sequence[np.ndarray], device: torch.device | str) -> Spans:
    """The spans of pieces that follow one another and fill their row.

    Args:
        own: places in the row of each piece's tokens.
        before: int64, places of what each goes on from.
    """
    queries = [len(places) for places in own]
    keys = [len(places) + len(others) for places, others in zip(own, before, strict=True)]

    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    places = None
    if any(map(len, before)):
        mine = [np.arange(places.start, places.stop) for places in own]
        together = np.concatenate([part for parts in zip(before, mine, strict=True) for part in parts])
        places = torch.from_numpy(together)[None].to(device)
    return Spans(places, starts(queries), starts(keys), max(queries), max(keys))


def runs_on(query: Tensor, dropout: float) -> bool:
    """Whether there is a kernel for queries [T, H, D] of this kind; it has no dropout and no float32."""
    return (
        query.is_cuda
        and not dropout
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= _LARGEST_HEAD
        and _has_kernel(query.device)
    )


def span_attention(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> Tensor:
    """Softmax attention of each piece's queries over its keys.

    Args:
        query: [T, H, D].
        key, value: [A, H or a divisor of it, D], in the order of ``spans.keys``.
        scale: of the scores.

    Returns:
        [T, H, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(
        query,
        key,
        value,
        spans.query_starts,
        spans.key_starts,
        spans.most_queries,
        spans.most_keys,
        scale=scale,
        window_size=(-1, 0),  # causal, aligned with the last query and the last key
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(found, Tensor)
    return found


@lru_cache
def _has_kernel(device: torch.device) -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    # The first versions knew neither shared key heads nor windows.
    knows = {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
    return knows and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
