"""What cleanlab finds in labels: a line of JSON for each folder that is named on the standard input.

    cleanlab_labels.py < folders

A folder holds ``features.npy`` (float64 [N, D]), ``labels.npy`` (int64 [N]) and ``probabilities.npy`` (float64 [N, K],
out of fold). By every filter of cleanlab over these predictions, and by ``CleanLearning`` as it is by default, which
makes its own, the answer has the rows that are flagged and the ``scores`` by which records are ranked, lowest first.
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
        found = {}
        for name in FILTERS:
            start = time.perf_counter()
            flagged = find_label_issues(labels, probabilities, filter_by=name, n_jobs=1)
            seconds = time.perf_counter() - start
            found[name] = {"flagged": np.flatnonzero(flagged).tolist(), "seconds": seconds}
        start = time.perf_counter()
        own = CleanLearning(seed=0).find_label_issues(np.load(folder / "features.npy"), labels)
        alone = {
            "flagged": np.flatnonzero(own["is_label_issue"]).tolist(),
            "scores": own["label_quality"].tolist(),
            "seconds": time.perf_counter() - start,
        }
        print(json.dumps({"filters": found, "rankings": scores, "own": alone}), flush=True)


if __name__ == "__main__":
    main()
