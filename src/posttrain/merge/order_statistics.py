"""Exact order statistics of tensors that are read in blocks: the k-th largest magnitude, without sorting."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Magnitudes = Callable[[int], Iterator[list[np.ndarray]]]
"""Called with a stride, yields every stride-th magnitude of each model, block by block; float32."""

_SAMPLE = 1 << 18  # elements whose quantiles bracket the result
_DEVIATIONS = 4.0  # standard deviations of a quantile of the sample on each side of it
_TIES = 0.02  # share of the sample up to which the elements that equal an end of the bracket are collected, too


def rank_of_share(share: float, elements: int) -> int:
    """Returns the share of the elements as a number, rounded down; of a share above 0 at least one."""
    return max(1, int(share * elements)) if share > 0 and elements else 0


def of_ranks(magnitudes: Magnitudes, ranks: Sequence[int], elements: int) -> list[float]:
    """Returns the k-th largest element of each sequence, exactly.

    The quantiles of a sample bracket the result; one pass counts the elements above the bracket and collects those in
    it, among which the result is selected (after Floyd and Rivest 1975). Memory is that of the sample and the bracket,
    a hundredth of the elements, and each pass reads them in order.

    Args:
        magnitudes: the elements of all sequences.
        ranks: k of each sequence, from 1 for the largest; 0 gives infinity.
        elements: length of each sequence.
    """
    results = {model: float("inf") for model, rank in enumerate(ranks) if not rank}
    searched = {model: rank for model, rank in enumerate(ranks) if rank}
    stride = max(1, elements // _SAMPLE)
    # Odd, as the columns of a weight matrix are a power of two, and some of them are unlike the others.
    stride += (stride > 1) * (1 - stride % 2)
    sample: list[list[np.ndarray]] = [[] for _ in ranks]
    for block in magnitudes(stride) if searched else ():
        for model in searched:
            sample[model].append(block[model].copy())
    brackets = {}
    for model, rank in searched.items():
        drawn = np.concatenate(sample[model])
        if stride == 1:
            results[model] = float(np.partition(drawn, elements - rank)[elements - rank])
        else:
            drawn.sort()
            brackets[model] = _bracket(drawn, rank / elements)
    del sample
    while brackets:
        _narrow(magnitudes, searched, brackets, results)
    return [results[model] for model in range(len(ranks))]


def _bracket(drawn: np.ndarray, share: float) -> tuple[float, float]:
    """Returns values between which the element lies that a share of all reach, almost surely; of a sorted sample."""
    count = len(drawn)
    at = (1 - share) * count
    margin = _DEVIATIONS * np.sqrt(max(share * (1 - share) * count, 1.0))
    low = _widened(drawn, drawn[int(at - margin)], -np.inf) if at - margin >= 0 else -np.inf
    high = _widened(drawn, drawn[int(at + margin) + 1], np.inf) if at + margin + 1 < count else np.inf
    return float(low), float(high)


def _widened(drawn: np.ndarray, end: np.float32, beyond: float) -> np.float32:
    """Moves an end to the next number, so that those that equal it are collected, unless they are many.

    Differences of weights in bfloat16 take few values, and the result is often one of the ends.
    """
    ties = np.searchsorted(drawn, end, "right") - np.searchsorted(drawn, end, "left")
    return np.nextafter(end, np.float32(beyond)) if ties <= _TIES * len(drawn) else end


def _narrow(
    magnitudes: Magnitudes,
    ranks: dict[int, int],
    brackets: dict[int, tuple[float, float]],
    results: dict[int, float],
) -> None:
    """Counts and collects in one pass; moves results out of ``brackets`` and narrows or widens those that missed."""
    above: dict[int, int] = dict.fromkeys(brackets, 0)
    inside: dict[int, list[np.ndarray]] = {model: [] for model in brackets}
    for block in magnitudes(1):
        for model, (low, high) in brackets.items():
            values = block[model]
            over_low, from_high = values > low, values >= high
            above[model] += int(np.count_nonzero(from_high))
            # Elements that equal an end are not collected: of a tensor that training left alone, all task vectors are
            # zero. Of two masks the greater is the one without the other.
            inside[model].append(np.compress(np.greater(over_low, from_high, out=over_low), values))
    missed = []
    for model in list(brackets):
        between = np.concatenate(inside[model])
        if above[model] < ranks[model] <= above[model] + len(between):
            at = len(between) - (ranks[model] - above[model])
            results[model] = float(np.partition(between, at)[at])
            del brackets[model]
        else:
            missed.append((model, above[model], len(between)))
    if missed:
        _look_at_ends(magnitudes, ranks, brackets, results, missed)


def _look_at_ends(
    magnitudes: Magnitudes,
    ranks: dict[int, int],
    brackets: dict[int, tuple[float, float]],
    results: dict[int, float],
    missed: Sequence[tuple[int, int, int]],
) -> None:
    """Decides in one pass whether the results that are not inside of their brackets are one of its ends.

    Args:
        missed: model, elements of at least the upper end, and elements inside of the bracket.
    """
    at_high, at_low = dict.fromkeys(brackets, 0), dict.fromkeys(brackets, 0)
    for block in magnitudes(1):
        for model, (low, high) in brackets.items():
            at_high[model] += int(np.count_nonzero(block[model] == high)) if np.isfinite(high) else 0
            at_low[model] += int(np.count_nonzero(block[model] == low)) if low < high else 0
    for model, above, between in missed:
        (low, high), rank = brackets[model], ranks[model]
        strictly = above - at_high[model]
        if strictly < rank <= above:
            results[model] = high
        elif above < rank <= above + between + at_low[model]:
            results[model] = low
        else:
            # The sample was unlike the whole: everything on the side that holds it is looked at.
            brackets[model] = (high, float("inf")) if rank <= strictly else (float("-inf"), low)
            continue
        del brackets[model]
