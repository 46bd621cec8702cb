"""Exact order statistics of tensors that are read in blocks: the k-th largest magnitude, without sorting."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Magnitudes = Callable[[int], Iterator[list[np.ndarray]]]
"""Called with a stride, yields every stride-th element of each sequence, block by block; float32."""

_SAMPLE = 1 << 18  # elements whose quantiles bracket the result
_DEVIATIONS = 6.0  # standard deviations of a quantile of the sample on each side of it


def rank_of_share(share: float, elements: int) -> int:
    """Returns the share of the elements as a number, rounded down; of a share above 0 at least one."""
    return max(1, int(share * elements)) if share > 0 and elements else 0


def kth_largest(magnitudes: Magnitudes, ranks: Sequence[int], elements: int) -> list[float]:
    """Returns the k-th largest element of each sequence, exactly.

    The quantiles of a sample bracket the result; one pass counts the elements above the bracket and collects those in
    it, among which the result is selected (after Floyd and Rivest 1975). Memory is that of the sample and the bracket,
    a hundredth of the elements, and each pass reads them in order.

    Args:
        magnitudes: the elements of all sequences.
        ranks: k of each sequence, from 1 for the largest; 0 gives infinity.
        elements: length of each sequence.
    """
    results: dict[int, float] = {sequence: float("inf") for sequence, rank in enumerate(ranks) if not rank}
    searched = {sequence: rank for sequence, rank in enumerate(ranks) if rank}
    stride = max(1, elements // _SAMPLE)
    # Odd, as the columns of a weight matrix are a power of two, and some of them are unlike the others.
    stride += (stride > 1) * (1 - stride % 2)
    sample: list[list[np.ndarray]] = [[] for _ in ranks]
    for block in magnitudes(stride) if searched else ():
        for sequence in searched:
            sample[sequence].append(block[sequence].copy())
    brackets = {}
    for sequence, rank in searched.items():
        drawn = np.concatenate(sample[sequence])
        if stride == 1:
            results[sequence] = float(np.partition(drawn, elements - rank)[elements - rank])
        else:
            drawn.sort()
            brackets[sequence] = _bracket(drawn, rank / elements)
    del sample
    while brackets:
        _narrow(magnitudes, searched, brackets, results)
    return [results[sequence] for sequence in range(len(ranks))]


def _bracket(drawn: np.ndarray, share: float) -> tuple[float, float]:
    """Returns values between which the element lies that a share of all reach, almost surely."""
    count = len(drawn)
    at = (1 - share) * count
    margin = _DEVIATIONS * np.sqrt(max(share * (1 - share) * count, 1.0))
    low = drawn[int(at - margin)] if at - margin >= 0 else -np.inf
    high = drawn[int(at + margin) + 1] if at + margin + 1 < count else np.inf
    return float(low), float(high)


def _narrow(
    magnitudes: Magnitudes,
    ranks: dict[int, int],
    brackets: dict[int, tuple[float, float]],
    results: dict[int, float],
) -> None:
    """Counts and collects in one pass; moves results out of ``brackets`` and widens those that missed."""
    above, level = dict.fromkeys(brackets, 0), dict.fromkeys(brackets, 0)
    lowest = dict.fromkeys(brackets, 0)
    inside: dict[int, list[np.ndarray]] = {sequence: [] for sequence in brackets}
    for block in magnitudes(1):
        for sequence, (low, high) in brackets.items():
            values = block[sequence]
            over_low = values > low
            above_high = values >= high
            above[sequence] += int(np.count_nonzero(above_high))
            inside[sequence].append(values[over_low & ~above_high])
            # Elements that equal an end are counted and not collected: of a tensor that training left alone, all
            # task vectors are zero.
            if np.isfinite(high):
                level[sequence] += int(np.count_nonzero(values == high))
            lowest[sequence] += int(np.count_nonzero(values == low))
    for sequence, (low, high) in list(brackets.items()):
        rank, between = ranks[sequence], np.concatenate(inside[sequence])
        strictly = above[sequence] - level[sequence]
        if strictly < rank <= above[sequence]:
            results[sequence] = high
        elif above[sequence] < rank <= above[sequence] + len(between):
            at = len(between) - (rank - above[sequence])
            results[sequence] = float(np.partition(between, at)[at])
        elif above[sequence] + len(between) < rank <= above[sequence] + len(between) + lowest[sequence]:
            results[sequence] = low
        else:
            # The sample was unlike the whole: everything on the side that holds it is looked at.
            brackets[sequence] = (high, float("inf")) if rank <= strictly else (float("-inf"), low)
            continue
        del brackets[sequence]
