"""Measures how many records of an embedded pool the model must score for facility location to choose well.

    python benchmarks/asked_records.py --data DIR [--seeds 3] [--features FOLDER]

``DIR`` holds ``banking77_train.csv`` and ``banking77_test.csv``. The pool is all 10,003 messages. In each of three
rounds facility location on MiniLM's embeddings chooses 150 records to label: by coverage alone in the first round, then
weighted by the least confidence of a logistic regression. Each round draws ``embedded`` records to choose from; the
logistic regression scores ``asked`` of them, and the scores of the others are imputed from their nearest neighbours, as
in the loop. ``area`` is the mean accuracy of the three rounds on all test messages.
"""

import argparse
from pathlib import Path

import numpy as np
from label_efficiency import UNREDUCED, task_split

from posttrain.select.learning_curve import CurveTask, fit_linear_head
from posttrain.select.score_columns import knn_impute, with_labelled
from posttrain.select.scores import uncertainty
from posttrain.select.selectors.registry import select

POOL_SIZE = 10_003
SETTINGS = ((1200, 1200), (2500, 2500), (5000, 5000), (POOL_SIZE, 0), (POOL_SIZE, 600), (POOL_SIZE, 1200))
PER_ROUND, ROUNDS = 150, 3


def round_accuracies(task: CurveTask, n_embedded: int, n_scored: int, seed: int) -> list[float]:
    """Return the test accuracy after each round.

    Args:
        n_embedded: records to choose from in each round; 0: the batch is drawn at random.
        n_scored: records that the logistic regression scores; 0: the batch is chosen by coverage alone.
    """
    labelled = np.zeros(len(task.labels), bool)
    least_confidence = None
    test_accuracies = []
    for round_index in range(ROUNDS):
        free = np.random.default_rng([seed, round_index]).permutation(np.flatnonzero(~labelled))
        selected = free[:PER_ROUND]
        if n_embedded:
            rows = free[:n_embedded]
            columns, options = {"embeddings": task.features[rows]}, UNREDUCED
            if least_confidence is not None and n_scored:
                columns["least_confidence"] = least_confidence[rows]
                columns = knn_impute(columns, np.arange(len(rows)) < n_scored, task.features[rows])
                options = UNREDUCED | {"by": "least_confidence"}
            columns = with_labelled(columns, task.features[labelled])
            is_labelled = np.arange(len(columns["embeddings"])) >= len(rows)
            selected = rows[select("facility_location", columns, PER_ROUND, seed, is_labelled, **options)]
        labelled[selected] = True
        head = fit_linear_head(task, labelled)
        least_confidence = uncertainty.least_confidence(head.probabilities)
        test_accuracies.append(head.accuracy)
    return test_accuracies


def main() -> None:
    """Run all settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--features", type=Path, help="folder that caches the embeddings")
    arguments = parser.parse_args()
    train, test = (task_split("banking77", split, arguments.data, arguments.features) for split in ("train", "test"))
    task = CurveTask(*train, *test, classes=int(train[1].max()) + 1)
    counts = [PER_ROUND * round_number for round_number in range(1, ROUNDS + 1)]
    print("| embedded | asked | " + " | ".join(map(str, counts)) + " | area |")
    print("| ---: | ---: |" + " ---: |" * (ROUNDS + 1))
    for setting in ((0, 0), *SETTINGS, (POOL_SIZE, POOL_SIZE)):
        mean = np.mean([round_accuracies(task, *setting, seed) for seed in range(arguments.seeds)], axis=0)
        cells = " | ".join(f"{value:.3f}" for value in mean)
        print(f"| {setting[0]:,} | {setting[1]:,} | {cells} | {mean.mean():.4f} |", flush=True)


if __name__ == "__main__":
    main()
