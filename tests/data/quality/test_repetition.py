"""Shares of repetition agree with a slow count."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.quality import repetition
from posttrain.data.quality.repetition import ngram_shares, repeated_shares

WORDS = st.lists(st.sampled_from(["a", "b", "cc", "ddd"]), max_size=30).map(" ".join)


def count_top(text: str, n: int) -> float:
    """The share of characters in all occurrences of the most frequent n-gram, if it occurs twice or more."""
    words = text.split()
    counts = Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))
    top_count = max(counts.values(), default=0)
    if not words:
        return math.nan
    if top_count < 2:
        return 0
    longest = max(len("".join(gram)) for gram, count in counts.items() if count == top_count)
    return min(top_count * longest / len("".join(words)), 1)


def count_repeated(text: str, n: int) -> float:
    """The share of characters in words of an n-gram that occurred before."""
    words = text.split()
    earlier_grams, positions = set(), set()
    for start in range(len(words) - n + 1):
        gram = tuple(words[start : start + n])
        if gram in earlier_grams:
            positions |= set(range(start, start + n))
        earlier_grams.add(gram)
    if not words:
        return math.nan
    return sum(len(words[position]) for position in positions) / len("".join(words))


@pytest.mark.slow
@given(st.lists(WORDS, max_size=8), st.integers(1, 40))
def test_ngram_shares_equal_the_slow_count(texts: list[str], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repetition, "_WORDS_A_BLOCK", block)
        result = ngram_shares(texts, range(1, 7), range(1, 11))
    for n in range(1, 7):
        np.testing.assert_allclose(result.top[n], [count_top(text, n) for text in texts])
    for n in range(1, 11):
        np.testing.assert_allclose(result.repeated[n], [count_repeated(text, n) for text in texts])


def test_exact_shares_of_n_grams() -> None:
    result = ngram_shares(["aa b cc aa b dd", "one two three", "", "x x x x"], [2, 3], [2])
    np.testing.assert_allclose(result.top[2], [6 / 10, 0, math.nan, 1])
    np.testing.assert_allclose(result.top[3], [0, 0, math.nan, 1])
    np.testing.assert_allclose(result.repeated[2], [3 / 10, 0, math.nan, 3 / 4])


def test_no_texts() -> None:
    result = ngram_shares([], [2], [5])
    assert len(result.top[2]) == len(result.repeated[5]) == 0


@given(st.lists(st.sampled_from(["", "a", "bb", "ccc"])))
def test_repeated_shares_equal_the_slow_count(parts: list[str]) -> None:
    repeats = [part for position, part in enumerate(parts) if part in parts[:position]]
    share, characters = repeated_shares(parts)
    total = len("".join(parts))
    if parts and total:
        assert (share, characters) == pytest.approx((len(repeats) / len(parts), len("".join(repeats)) / total))
    assert math.isnan(characters) == (total == 0)
