"""Finds runs of words that occur more than once among many texts, exactly.

A window is ``length`` words in a row. Each is known by the least hash of the shorter runs of ``length // 2 + 1`` words
in it, which equal windows have in common (winnowing; Schleimer, Wilkerson and Aiken, "Winnowing: local algorithms for
document fingerprinting", SIGMOD 2003). Neighbouring windows mostly have the same, so that all texts are compared by
about one hash in 13 words, at 50 words a window. Only windows whose least hash also occurs elsewhere are then hashed
whole, and what has equal hashes is compared word by word.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from posttrain.data.arrays import Hashes, Indices
from posttrain.data.duplicates.shingles import Shingles, ngram_sequences, offsets_of
from posttrain.data.records.record import fold_case


class WordWindows(NamedTuple):
    """Holds some windows of some texts [W].

    Attributes:
        text: int64, the number of the text.
        position: int64, the window's first word.
        value: uint64, hash of its words.
    """

    text: Indices
    position: Indices
    value: Hashes


class RepeatedSpan(NamedTuple):
    """Describes a run of words that occurs earlier.

    Attributes:
        text, begin, end: The text and its words ``begin:end``.
        source, at: The text in which the same words begin with the word ``at``.
    """

    text: int
    begin: int
    end: int
    source: int
    at: int


def fingerprints(texts: Sequence[str], length: int) -> Shingles:
    """Fingerprints each text by uint64 hashes, not sorted.

    If two windows of the same words do not overlap, their least hash is among these at least twice.
    """
    least = _window_minima(texts, length)
    width = length - _short_run(length) + 1
    new = np.ones(len(least.values), dtype=bool)
    np.not_equal(least.values[1:], least.values[:-1], out=new[1:])
    new[least.offsets[:-1][least.sizes > 0]] = True
    # A hash at one place is the least of so many windows in a row at most: a longer run means several places.
    starts = np.flatnonzero(new)
    new[(np.arange(len(new)) - np.repeat(starts, np.diff(starts, append=len(new)))) % width == 0] = True
    return Shingles(least.values[new], np.concatenate([np.zeros(1, np.int64), np.cumsum(new)])[least.offsets])


def repeated_values(values: Hashes) -> Hashes:
    """Finds the hashes that occur at least twice in ``values``, sorted and distinct."""
    values = np.sort(values)
    return np.unique(values[1:][values[1:] == values[:-1]])


def is_member(values: Hashes, members: Hashes) -> npt.NDArray[np.bool_]:
    """Returns True for each value that is one of ``members``, which is sorted: bool [N]."""
    if not len(members):
        return np.zeros(len(values), dtype=bool)
    return np.asarray(members[np.minimum(np.searchsorted(members, values), len(members) - 1)] == values)


def windows(texts: Sequence[str], length: int, shared: Hashes) -> WordWindows:
    """Finds the windows whose fingerprint is one of ``shared``; texts are numbered from 0."""
    least = _window_minima(texts, length)
    whole = ngram_sequences(texts, length, "word")
    # A text that is shorter than a window has one run and no window.
    inside = np.repeat(least.sizes > 0, whole.sizes)
    text = np.repeat(np.arange(len(texts)), least.sizes)
    position = np.arange(len(text)) - np.repeat(least.offsets[:-1], least.sizes)
    repeated = is_member(least.values, shared)
    return WordWindows(text[repeated], position[repeated], whole.values[inside][repeated])


def concatenate_windows(parts: Sequence[WordWindows]) -> WordWindows:
    """Concatenates windows."""
    return WordWindows(
        np.concatenate([np.empty(0, np.int64), *(part.text for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.position for part in parts)]),
        np.concatenate([np.empty(0, np.uint64), *(part.value for part in parts)]),
    )


def find_repeats(windows: WordWindows, length: int) -> list[RepeatedSpan]:
    """Finds windows that seem to occur earlier, in text order; equal hashes are not yet equal words.

    The first of equal windows is kept, and so are those that overlap it in the same text. Windows that are neighbours
    in text and source form one run, so that runs are as long as possible.

    Args:
        windows: Windows in the order of the texts and of the words in them.
    """
    order = np.argsort(windows.value, kind="stable")
    values = windows.value[order]
    new = np.ones(len(order), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    first = np.empty(len(order), dtype=np.int64)
    # A stable sort makes the first window of equal ones the earliest in text order.
    first[order] = order[new][np.cumsum(new) - 1] if len(order) else order
    source, at = windows.text[first], windows.position[first]
    repeated = (source != windows.text) | (windows.position - at >= length)
    text, position, source, at = windows.text[repeated], windows.position[repeated], source[repeated], at[repeated]
    border = np.ones(len(text) + 1, dtype=bool)
    border[1:-1] = (text[1:] != text[:-1]) | (source[1:] != source[:-1]) | (np.diff(position) != 1) | (np.diff(at) != 1)
    edges = np.flatnonzero(border)
    begins, ends = edges[:-1], edges[1:] - 1
    columns = (text[begins], position[begins], position[ends] + length, source[begins], at[begins])
    return [RepeatedSpan(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def verify_span(
    repeat: RepeatedSpan, own_words: Sequence[str], source: Sequence[str], length: int
) -> list[RepeatedSpan]:
    """Keeps the parts of a span that agree word by word: all of it, unless two windows share a hash by chance."""
    size = repeat.end - repeat.begin
    # Two different windows share a 64-bit hash hardly ever, but a removal must rest on equal words.
    if own_words[repeat.begin : repeat.end] == source[repeat.at : repeat.at + size]:
        return [repeat]
    shifts = [
        shift
        for shift in range(size - length + 1)
        if own_words[repeat.begin + shift : repeat.begin + shift + length]
        == source[repeat.at + shift : repeat.at + shift + length]
    ]
    return [
        RepeatedSpan(repeat.text, repeat.begin + shift, repeat.begin + shift + length, repeat.source, repeat.at + shift)
        for shift in shifts
    ]


def comparable_words(text: str) -> list[str]:
    """Splits a text into the words that are compared: without case, separated by whitespace."""
    return fold_case(text).split()


def _short_run(length: int) -> int:
    return length // 2 + 1


def _window_minima(texts: Sequence[str], length: int) -> Shingles:
    """Computes the smallest hash of every window, in the order of the text."""
    gram = _short_run(length)
    width = length - gram + 1
    short = ngram_sequences(texts, gram, "word")
    least, size = short.values, 1
    # Minima over windows that double in length take about log2(width) passes.
    while 2 * size <= width:
        least = np.minimum(least[:-size], least[size:])
        size *= 2
    if size < width:
        least = np.minimum(least[: size - width], least[width - size :])
    counts = np.maximum(short.sizes - width + 1, 0)
    offsets = offsets_of(counts)
    positions = np.arange(offsets[-1]) + np.repeat(short.offsets[:-1] - offsets[:-1], counts)
    return Shingles(least[positions], offsets)
