"""Learning curves of the peers' strategies: a line of JSON for each.

    active_learning.py FOLDER COUNTS [STRATEGY,STRATEGY]

A folder, named by the seed, holds ``features.npy``, ``labels.npy``, ``test_features.npy`` and ``test_labels.npy``; the
head is the same logistic regression as ours. Strategies that need labels start from some drawn at random.
"""

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from skactiveml import pool
from skactiveml.classifier import SklearnClassifier
from sklearn.linear_model import LogisticRegression

warnings.simplefilter("ignore")

ALONE = {
    "scikit-activeml CoreSet": lambda seed: pool.CoreSet(random_state=seed),
    "scikit-activeml TypiClust": lambda seed: pool.TypiClust(random_state=seed),
    "scikit-activeml ProbCover": lambda seed: pool.ProbCover(random_state=seed),
    "scikit-activeml MaxHerding": lambda seed: pool.MaxHerding(random_state=seed),
}
WITH_MODEL = {
    "scikit-activeml margin": lambda seed: pool.UncertaintySampling("margin_sampling", random_state=seed),
    "scikit-activeml entropy": lambda seed: pool.UncertaintySampling("entropy", random_state=seed),
    "scikit-activeml BADGE": lambda seed: pool.Badge(random_state=seed),
    "scikit-activeml Falcun": lambda seed: pool.Falcun(random_state=seed),
    "scikit-activeml CLUE": lambda seed: pool.Clue(random_state=seed),
}
SMALL_TEXT = ["small-text greedy core-set", "small-text lightweight core-set", "small-text k-means"]


def head():
    return LogisticRegression(C=30.0, max_iter=200, tol=1e-3)


def small_text(name, features, labelled, n):
    """Rows of small-text's strategies that work on embeddings alone."""
    from small_text import query_strategies as strategies

    free, known = np.flatnonzero(~labelled), np.flatnonzero(labelled)
    if name == "small-text greedy core-set":
        return free[strategies.greedy_coreset(features, free, known, n)]
    if name == "small-text lightweight core-set":
        return free[strategies.lightweight_coreset(features[free], features[free].mean(axis=0), n)]
    return free[strategies.EmbeddingKMeans().sample(None, None, free, known, None, n, features)]


def curve(name, features, labels, test_features, test_labels, counts, seed):
    generator = np.random.default_rng(seed)
    labelled = np.zeros(len(labels), bool)
    accuracies, seconds = [], 0.0
    everything = np.arange(labels.max() + 1)
    for count in counts:
        n = count - int(labelled.sum())
        start = time.perf_counter()
        given = np.where(labelled, labels, np.nan)
        if name in ALONE:
            rows = ALONE[name](seed).query(features, given, batch_size=n)
        elif not labelled.any():
            rows = generator.permutation(len(labels))[:n]
        elif name in WITH_MODEL:
            model = SklearnClassifier(head(), classes=everything)
            rows = WITH_MODEL[name](seed).query(features, given, model, True, batch_size=n)
        else:
            np.random.seed(seed)
            rows = small_text(name, features, labelled, n)
        seconds += time.perf_counter() - start
        labelled[rows] = True
        model = head().fit(features[labelled], labels[labelled])
        accuracies.append(float((model.predict(test_features) == test_labels).mean()))
    return accuracies, seconds


def main() -> None:
    folder, counts = Path(sys.argv[1]), json.loads(sys.argv[2])
    names = sys.argv[3].split(",") if len(sys.argv) > 3 else [*ALONE, *WITH_MODEL, *SMALL_TEXT]
    seed = int(folder.name)
    arrays = [np.load(folder / f"{name}.npy") for name in ("features", "labels", "test_features", "test_labels")]
    for name in names:
        accuracies, seconds = curve(name, *arrays, counts, seed)
        print(json.dumps({"strategy": name, "accuracies": accuracies, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
