"""Is it enough to ask the champion about a part of the pool, when all of it is embedded?

    python benchmarks/asked_records.py --data DIR [--seeds 3] [--features FOLDER]

``DIR`` holds ``banking77_train.csv`` and ``banking77_test.csv``. All 10,003 messages lie in the pool, and 150 labels
are asked for in each of three rounds, by facility location on MiniLM's embeddings: the first batch without doubts, then
by the least confidence of a logistic regression. ``embedded`` records are drawn anew in each round to choose from, of
which ``asked`` have been answered by the head; their neighbours speak for the others, as in the loop. ``area`` is the
mean accuracy of the three rounds on all test messages.
"""

import argparse
from pathlib import Path

import numpy as np
from label_efficiency import AS_THEY_ARE, task_part

from posttrain.select.learning_curve import CurveTask, fit_linear_head
from posttrain.select.score_columns import knn_impute, with_labelled
from posttrain.select.scores import uncertainty
from posttrain.select.selectors.registry import select

EVERYBODY = 10_003
SETTINGS = ((1200, 1200), (2500, 2500), (5000, 5000), (EVERYBODY, 0), (EVERYBODY, 600), (EVERYBODY, 1200))
PER_ROUND, ROUNDS = 150, 3


def accuracies(task: CurveTask, embedded: int, asked: int, seed: int) -> list[float]:
    """After each round; drawn at random where ``embedded`` is 0, chosen without doubts where ``asked`` is."""
    labelled = np.zeros(len(task.labels), bool)
    doubts = None
    found = []
    for turn in range(ROUNDS):
        free = np.random.default_rng([seed, turn]).permutation(np.flatnonzero(~labelled))
        chosen = free[:PER_ROUND]
        if embedded:
            rows = free[:embedded]
            columns, options = {"embeddings": task.features[rows]}, AS_THEY_ARE
            if doubts is not None and asked:
                columns["least_confidence"] = doubts[rows]
                columns = knn_impute(columns, np.arange(len(rows)) < asked, task.features[rows])
                options = AS_THEY_ARE | {"by": "least_confidence"}
            columns = with_labelled(columns, task.features[labelled])
            covered = np.arange(len(columns["embeddings"])) >= len(rows)
            chosen = rows[select("facility_location", columns, PER_ROUND, seed, covered, **options)]
        labelled[chosen] = True
        head = fit_linear_head(task, labelled)
        doubts = uncertainty.least_confidence(head.probabilities)
        found.append(head.accuracy)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--features", type=Path, help="where the embeddings are kept")
    arguments = parser.parse_args()
    train, test = (task_part("banking77", part, arguments.data, arguments.features) for part in ("train", "test"))
    task = CurveTask(*train, *test, classes=int(train[1].max()) + 1)
    counts = [PER_ROUND * turn for turn in range(1, ROUNDS + 1)]
    print("| embedded | asked | " + " | ".join(map(str, counts)) + " | area |")
    print("| ---: | ---: |" + " ---: |" * (ROUNDS + 1))
    for one in ((0, 0), *SETTINGS, (EVERYBODY, EVERYBODY)):
        mean = np.mean([accuracies(task, *one, seed) for seed in range(arguments.seeds)], axis=0)
        shown = " | ".join(f"{value:.3f}" for value in mean)
        print(f"| {one[0]:,} | {one[1]:,} | {shown} | {mean.mean():.4f} |", flush=True)


if __name__ == "__main__":
    main()
