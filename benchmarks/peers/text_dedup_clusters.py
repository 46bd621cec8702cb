"""Clusters with text-dedup 0.4.0: its signature, banding and union-find, without its reading and writing of data sets.

Its pattern for word borders is replaced by one that splits a text into characters, so that its shingles are those of
the others. Everything else is its default: 250 permutations, SHA-1, 64 bits.

python text_dedup_clusters.py TEXTS.json THRESHOLD NGRAM CLUSTERS.json
"""

from collections import defaultdict
from typing import Any

import numpy as np
from clustering import run
from text_dedup import minhash
from text_dedup.utils import UnionFind, optimal_param, sha1_hash

PERMUTATIONS = 250
LARGEST = np.uint32((1 << 32) - 1)
PRIME = np.uint64((1 << 61) - 1)


class Characters:
    """Replaces the pattern of word borders."""

    def split(self, text: str) -> list[str]:
        """Split the text into characters."""
        return list(text)


def cluster(texts: list[str], threshold: float, ngram: int) -> list[int]:
    """Return the cluster of every text."""
    minhash.NON_ALPHA = Characters()
    bands, rows = optimal_param(threshold, PERMUTATIONS, 0.5, 0.5)
    generator = np.random.RandomState(42)
    permutations = (
        generator.randint(1, PRIME, size=(PERMUTATIONS,), dtype=np.uint64),
        generator.randint(0, PRIME, size=(PERMUTATIONS,), dtype=np.uint64),
    )
    tables: list[dict[bytes, set[int]]] = [defaultdict(set) for _ in range(bands)]
    settings: dict[str, Any] = {
        "num_perm": PERMUTATIONS, "ngram_size": ngram, "min_length": 0, "permutations": permutations,
        "hashranges": [(band * rows, (band + 1) * rows) for band in range(bands)],
        "hash_func": lambda data: sha1_hash(data, d=32), "dtype": np.uint64, "max_hash": LARGEST,
        "modulo_prime": PRIME,
    }  # fmt: skip
    for row, text in enumerate(texts):
        for table, key in zip(tables, minhash.embed_func(text, row, **settings)[minhash.SIGNATURE_COLUMN], strict=True):
            table[key].add(row)
    union_find = UnionFind()
    for table in tables:
        for bucket in table.values():
            if len(bucket) > 1:
                first = min(bucket)
                for row in bucket:
                    union_find.union(row, first)
    return [union_find.find(row) for row in range(len(texts))]


if __name__ == "__main__":
    run(cluster)
