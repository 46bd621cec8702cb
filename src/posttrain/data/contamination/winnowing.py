"""Fingerprints of texts, by which those that share a run of words are found without their texts.

Of each run of n words the smallest hash of the shorter runs within it is kept, so that two texts that share a run of
n words share a fingerprint (Schleimer, Wilkerson and Aiken, "Winnowing: local algorithms for document
fingerprinting", SIGMOD 2003). Neighbouring runs mostly keep the same one: a text of 13-grams has two fingerprints for
five words.
"""

from collections.abc import Sequence

import numpy as np

from posttrain.data.duplicates.shingles import Shingles, runs

_WINDOW = 4  # shorter runs in a run; the more, the fewer fingerprints, and the more often they agree by chance


def minima(words: Sequence[str], ngram: int) -> Shingles:
    """The fingerprint of every run of ``ngram`` words; its place is that of the run in
    `posttrain.data.duplicates.shingles.runs`.

    Args:
        words: texts made by `posttrain.data.records.words.plain_words`; one of fewer words is one run.
    """
    window = min(_WINDOW, ngram)
    shorter = runs(words, ngram - window + 1, "word")
    least = shorter.values.copy()
    for further in range(1, window):
        np.minimum(least[:-further], shorter.values[further:], out=least[:-further])
    # A window at the end of a text reads on into the next one: it is no run, unless the text has no other.
    sizes = np.maximum(shorter.sizes - window + 1, 1)
    few = np.flatnonzero(shorter.sizes < window)
    if len(few):
        least[shorter.offsets[few]] = np.minimum.reduceat(shorter.values, shorter.offsets[:-1])[few]
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    places = np.arange(offsets[-1]) + np.repeat(shorter.offsets[:-1] - offsets[:-1], sizes)
    return Shingles(least[places], offsets)


def fingerprints(words: Sequence[str], ngram: int) -> Shingles:
    """The fingerprints of every text in the order of the text; neighbours differ. Arguments as in `minima`."""
    every = minima(words, ngram)
    new = np.ones(len(every.values), dtype=bool)
    np.not_equal(every.values[1:], every.values[:-1], out=new[1:])
    new[every.offsets[:-1]] = True
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(new)])
    return Shingles(every.values[new], before[every.offsets])
