"""Runs a peer that clusters texts: reads the texts from a file, and writes the clusters to another.

python PEER.py TEXTS.json THRESHOLD NGRAM CLUSTERS.json
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def run(cluster: Callable[[list[str], float, int], list[int]]) -> None:
    """Write the cluster of every text and the processor seconds that ``cluster(texts, threshold, ngram)`` takes."""
    source, threshold, ngram, target = sys.argv[1:]
    texts = json.loads(Path(source).read_text(encoding="utf-8"))
    start = time.process_time()
    clusters = cluster(texts, float(threshold), int(ngram))
    seconds = time.process_time() - start
    Path(target).write_text(json.dumps({"seconds": seconds, "clusters": clusters}), encoding="utf-8")
