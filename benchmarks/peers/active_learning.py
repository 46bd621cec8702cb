"""Computes the learning curves of the peers' strategies, and prints a line of JSON for each.

    active_learning.py FOLDER COUNTS [STRATEGY,STRATEGY]

The name of the folder is the seed. It holds ``features.npy``, ``labels.npy``, ``test_features.npy`` and
``test_labels.npy``; the head is the same logistic regression as ours. Strategies that need labels start from random
ones.
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

COLD_START_STRATEGIES = {
    "scikit-activeml CoreSet": lambda seed: pool.CoreSet(random_state=seed),
    "scikit-activeml TypiClust": lambda seed: pool.TypiClust(random_state=seed),
    "scikit-activeml ProbCover": lambda seed: pool.ProbCover(random_state=seed),
    "scikit-activeml MaxHerding": lambda seed: pool.MaxHerding(random_state=seed),
}
MODEL_STRATEGIES = {
    "scikit-activeml margin": lambda seed: pool.UncertaintySampling("margin_sampling", random_state=seed),
    "scikit-activeml entropy": lambda seed: pool.UncertaintySampling("entropy", random_state=seed),
    "scikit-activeml BADGE": lambda seed: pool.Badge(random_state=seed),
    "scikit-activeml Falcun": lambda seed: pool.Falcun(random_state=seed),
    "scikit-activeml CLUE": lambda seed: pool.Clue(random_state=seed),
}
SMALL_TEXT_STRATEGIES = ["small-text greedy core-set", "small-text lightweight core-set", "small-text k-means"]


def head():
    return LogisticRegression(C=30.0, max_iter=200, tol=1e-3)


def small_text(name, features, labelled, n):
    """Select n rows with one of small-text's strategies that use embeddings alone."""
    from small_text import query_strategies as strategies

    free, labelled_rows = np.flatnonzero(~labelled), np.flatnonzero(labelled)
    if name == "small-text greedy core-set":
        return free[strategies.greedy_coreset(features, free, labelled_rows, n)]
    if name == "small-text lightweight core-set":
        return free[strategies.lightweight_coreset(features[free], features[free].mean(axis=0), n)]
    return free[strategies.EmbeddingKMeans().sample(None, None, free, labelled_rows, None, n, features)]


def curve(name, features, labels, test_features, test_labels, counts, seed):
    generator = np.random.default_rng(seed)
    labelled = np.zeros(len(labels), bool)
    accuracies, seconds = [], 0.0
    classes = np.arange(labels.max() + 1)
    for count in counts:
        n = count - int(labelled.sum())
        start = time.perf_counter()
        partial_labels = np.where(labelled, labels, np.nan)
        if name in COLD_START_STRATEGIES:
            rows = COLD_START_STRATEGIES[name](seed).query(features, partial_labels, batch_size=n)
        elif not labelled.any():
            rows = generator.permutation(len(labels))[:n]
        elif name in MODEL_STRATEGIES:
            model = SklearnClassifier(head(), classes=classes)
            rows = MODEL_STRATEGIES[name](seed).query(features, partial_labels, model, True, batch_size=n)
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
    all_names = [*COLD_START_STRATEGIES, *MODEL_STRATEGIES, *SMALL_TEXT_STRATEGIES]
    names = sys.argv[3].split(",") if len(sys.argv) > 3 else all_names
    seed = int(folder.name)
    arrays = [np.load(folder / f"{name}.npy") for name in ("features", "labels", "test_features", "test_labels")]
    for name in names:
        accuracies, seconds = curve(name, *arrays, counts, seed)
        print(json.dumps({"strategy": name, "accuracies": accuracies, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
