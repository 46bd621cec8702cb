"""Rows of a matrix, a few at a time."""

from collections.abc import Iterator

from torch import Tensor

_NUMBERS = 1 << 17  # of a block: a handful of such blocks in float32 fits the processors' caches


def blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of a matrix [N, D] that are worked on while they are in the cache."""
    count = max(1, _NUMBERS // rows.shape[1])
    for start in range(0, len(rows), count):
        yield slice(start, start + count)
