"""Clusters with datasketch as its users do: MinHash, LSH, and the union of every text with the results of its query.

python datasketch_clusters.py TEXTS.json THRESHOLD NGRAM CLUSTERS.json
"""

from clustering import run
from datasketch import MinHash, MinHashLSH

PERMUTATIONS = 128


def cluster(texts: list[str], threshold: float, ngram: int) -> list[int]:
    """Return the cluster of every text."""
    sets = ([shingle.encode() for shingle in shingles(text, ngram)] for text in texts)
    sketches = MinHash.bulk(sets, num_perm=PERMUTATIONS)
    index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
    with index.insertion_session() as session:
        for row, sketch in enumerate(sketches):
            session.insert(row, sketch, check_duplication=False)
    parent = list(range(len(texts)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for row, sketch in enumerate(sketches):
        for other in index.query(sketch):
            a, b = root(row), root(other)
            parent[max(a, b)] = min(a, b)
    return [root(row) for row in range(len(texts))]


def shingles(text: str, ngram: int) -> set[str]:
    """Return the runs of ``ngram`` characters; a shorter text is one run."""
    return {text[start : start + ngram] for start in range(max(1, len(text) - ngram + 1))}


if __name__ == "__main__":
    run(cluster)
