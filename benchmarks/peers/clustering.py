"""What the peers that cluster texts share: texts are read from a file, and what was found is written to another.

python PEER.py TEXTS.json THRESHOLD NGRAM CLUSTERS.json
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def run(cluster: Callable[[list[str], float, int], list[int]]) -> None:
    """Write the cluster of every text and the processor seconds that ``cluster(texts, threshold, ngram)`` takes."""
    texts, threshold, ngram, target = sys.argv[1:]
    given = json.loads(Path(texts).read_text(encoding="utf-8"))
    start = time.process_time()
    clusters = cluster(given, float(threshold), int(ngram))
    seconds = time.process_time() - start
    Path(target).write_text(json.dumps({"seconds": seconds, "clusters": clusters}), encoding="utf-8")
