"""Finds label errors with cleanlab; prints a line of JSON for each folder that the standard input names.

    cleanlab_labels.py < folders

A folder holds ``features.npy`` (float64 [N, D]), ``labels.npy`` (int64 [N]) and ``probabilities.npy`` (float64 [N, K],
out of fold). The result has the flagged rows of every filter of cleanlab on these predictions, and of ``CleanLearning``
with its defaults, which makes its own; and the ``scores`` that rank the records, lowest first.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from cleanlab.classification import CleanLearning
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores

FILTERS = ("prune_by_noise_rate", "prune_by_class", "both", "confident_learning", "low_normalized_margin",
           "low_self_confidence")  # fmt: skip
RANKINGS = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")


def main() -> None:
    for line in sys.stdin:
        folder = Path(line.strip())
        labels, probabilities = np.load(folder / "labels.npy"), np.load(folder / "probabilities.npy")
        scores = {name: get_label_quality_scores(labels, probabilities, method=name).tolist() for name in RANKINGS}
        filters = {}
        for name in FILTERS:
            start = time.perf_counter()
            flagged = find_label_issues(labels, probabilities, filter_by=name, n_jobs=1)
            seconds = time.perf_counter() - start
            filters[name] = {"flagged": np.flatnonzero(flagged).tolist(), "seconds": seconds}
        start = time.perf_counter()
        issues = CleanLearning(seed=0).find_label_issues(np.load(folder / "features.npy"), labels)
        clean_learning = {
            "flagged": np.flatnonzero(issues["is_label_issue"]).tolist(),
            "scores": issues["label_quality"].tolist(),
            "seconds": time.perf_counter() - start,
        }
        print(json.dumps({"filters": filters, "rankings": scores, "own": clean_learning}), flush=True)


if __name__ == "__main__":
    main()
