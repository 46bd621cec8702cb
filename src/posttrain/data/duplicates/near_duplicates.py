"""Texts that say nearly the same."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def near_duplicates(
    texts: Sequence[str], threshold: float = 0.8, ngram: int = 5, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Cluster of every text, int64 [N], named by the smallest index in it.

    Texts are case-folded, their whitespace is folded, and each becomes its set of ``ngram``-character runs:
    characters rather than words, because a message of ten words has too few word runs to survive one typo.
    Pairs whose Jaccard similarity is at least ``threshold`` are joined; a cluster is what hangs together.
    Pairs are found by MinHash (`posttrain.data.duplicates.minhash`), which misses one in a thousand of those that are
    just at
    the threshold and fewer above it, and are verified exactly.

    Args:
        seed: draws the permutations, and so which few pairs at the threshold are missed.

    Raises:
        TypeError: ``texts`` is one text, or holds something that is none.
        ValueError: the threshold lies outside (0, 1], or ``ngram`` is below 1.
    """
    if isinstance(texts, str):
        raise TypeError("texts must be a list of texts, not one text")
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts must be strings, but texts[{row}] is {type(text).__name__}")
    from posttrain.data.duplicates.clusters import clusters
    from posttrain.data.duplicates.minhash import sketch

    return clusters(
        sketch(texts, threshold, ngram, seed), lambda rows: [texts[row] for row in rows.tolist()], threshold, ngram
    )
