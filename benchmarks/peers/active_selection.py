"""Selects rows from a folder's ``embeddings.npy`` and ``probabilities.npy`` with a peer; prints one line of JSON.

    active_selection.py METHOD FOLDER N

The result has the seconds of the selection without reading the arrays, the peak of resident memory, and the rows.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np


def k_means_scikit_learn(embeddings, probabilities, n):
    from sklearn.cluster import KMeans

    return nearest(embeddings, KMeans(n, n_init=1, random_state=0).fit(embeddings))


def nearest(embeddings, model):
    from sklearn.metrics import pairwise_distances_argmin

    return pairwise_distances_argmin(model.cluster_centers_, embeddings)


def facility_location_apricot(embeddings, probabilities, n):
    from apricot import FacilityLocationSelection

    return FacilityLocationSelection(n, metric="cosine", optimizer="lazy").fit(embeddings).ranking


def badge_scikit_activeml(embeddings, probabilities, n):
    from skactiveml.base import SkactivemlClassifier
    from skactiveml.pool import Badge

    class PrecomputedClassifier(SkactivemlClassifier):
        """A classifier that returns the precomputed probabilities."""

        def fit(self, X, y, sample_weight=None):
            return self

        def predict_proba(self, X):
            return probabilities

    classifier = PrecomputedClassifier(classes=range(probabilities.shape[1]))
    classifier.classes_ = np.arange(probabilities.shape[1])
    labels = np.full(len(embeddings), np.nan)
    return Badge(random_state=0).query(embeddings, labels, classifier, fit_clf=False, batch_size=n)


def peak_megabytes():
    """Return the peak of this process's resident memory; that of getrusage would start with the parent's peak."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) // 1024


def main() -> None:
    method, folder, n = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    embeddings, probabilities = np.load(folder / "embeddings.npy"), np.load(folder / "probabilities.npy")
    start = time.perf_counter()
    selected = globals()[method](embeddings, probabilities, n)
    seconds = time.perf_counter() - start
    memory = peak_megabytes()
    print(json.dumps({"seconds": seconds, "megabytes": memory, "rows": np.asarray(selected).tolist()}))


if __name__ == "__main__":
    main()
