"""Measures the gain of covering the pool over random selection, by the agreement of neighbours' labels.

    python benchmarks/shared_labels.py --data DIR [--seeds 3] [--features FOLDER]

``DIR`` is that of label_efficiency.py. The tasks are Banking77 with increasing noise on MiniLM's embeddings, or on the
labels, with its intents in five groups, and GSM8K's classes. ``kappa`` is the agreement on 500 test records, by which
``auto`` decides. ``gain`` is the accuracy of a logistic regression on labels that facility location selects minus that
on as many random labels, the mean over seeds and counts, and ``error`` its standard error over both. A second table
counts in how many of 20 samples of test records kappa would be too small for ``auto`` to cover the pool, if ``auto``
required no minimum number of test records.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from label_efficiency import RECORDS, UNREDUCED, task_split

from posttrain.select.learning_curve import CurvePlan, CurveTask, learning_curve
from posttrain.select.strategy import MAX_AGREEMENT_RECORDS, neighbour_agreement

LABEL_COUNTS = (50, 100, 200, 400)
SAMPLE_SIZES = (50, 100, 150, 200, 500)
SAMPLES, POOL_RECORDS = 20, 1200
Rows = tuple[np.ndarray, np.ndarray]


def add_noise(rows: Rows, scale: float, seed: int) -> Rows:
    """Add Gaussian noise of ``scale`` times their length to the embeddings."""
    points, labels = rows
    noise = np.random.default_rng(seed).normal(size=points.shape) / points.shape[1] ** 0.5
    noisy_points = points + scale * noise
    return (noisy_points / np.linalg.norm(noisy_points, axis=1, keepdims=True)).astype(np.float32), labels


def redraw_labels(rows: Rows, share: float, seed: int) -> Rows:
    """Replace a share of the labels by random ones."""
    generator = np.random.default_rng(seed)
    points, labels = rows
    random_labels = generator.integers(labels.max() + 1, size=len(labels))
    return points, np.where(generator.random(len(labels)) < share, random_labels, labels)


def settings(banking: tuple[Rows, Rows], gsm8k: tuple[Rows, Rows]) -> Iterator[tuple[str, tuple[Rows, Rows]]]:
    """Yield the name, training rows and test rows of each task."""
    yield "Banking77", banking
    for share in (1, 2, 3, 5):
        yield (
            f"Banking77, noise {share} times as long",
            tuple(add_noise(rows, share, seed) for seed, rows in enumerate(banking)),
        )
    for share in (0.3, 0.6, 0.8):
        yield (
            f"Banking77, {share:.0%} of the labels drawn",
            tuple(redraw_labels(rows, share, seed) for seed, rows in enumerate(banking)),
        )
    groups = np.random.default_rng(3).integers(5, size=77)
    yield "Banking77, five groups of intents", tuple((points, groups[labels]) for points, labels in banking)
    yield "GSM8K, five classes", gsm8k


def gains(train: Rows, test: Rows, seeds: int) -> np.ndarray:
    """Return the gains in accuracy of facility location over random selection, float64 [seeds, counts]."""
    differences = []
    for seed in range(seeds):
        rows = np.random.default_rng(seed).permutation(len(train[1]))[:RECORDS]
        task = CurveTask(train[0][rows], train[1][rows], *test, classes=int(train[1].max()) + 1)
        plans = CurvePlan("facility_location", LABEL_COUNTS, options=UNREDUCED), CurvePlan("random", LABEL_COUNTS)
        coverage, random = (learning_curve(task, plan, seed) for plan in plans)
        differences.append(coverage - random)
    return np.array(differences)


def count_refusals(train: Rows, test: Rows, size: int) -> int:
    """Count the samples in which kappa is surely below the bar."""
    count = 0
    for seed in range(SAMPLES):
        generator = np.random.default_rng(seed)
        rows, pool = generator.permutation(len(test[1]))[:size], generator.permutation(len(train[1]))[:POOL_RECORDS]
        agreement = neighbour_agreement(test[0][rows], test[1][rows], train[0][pool])
        count += not replace(agreement, records=MAX_AGREEMENT_RECORDS).neighbours_share_labels
    return count


def main() -> None:
    """Run all tasks and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--features", type=Path, help="folder that caches the embeddings")
    arguments = parser.parse_args()
    tasks = [
        (
            task_split(task, "train", arguments.data, arguments.features),
            task_split(task, "test", arguments.data, arguments.features),
        )
        for task in ("banking77", "gsm8k")
    ]
    print("| task | kappa | gain | error |")
    print("| --- | ---: | ---: | ---: |")
    for name, (train, test) in settings(*tasks):
        rows = np.random.default_rng(0).permutation(len(test[1]))[:MAX_AGREEMENT_RECORDS]
        kappa = neighbour_agreement(test[0][rows], test[1][rows], train[0]).kappa
        gain = gains(train, test, arguments.seeds)
        error = gain.std(ddof=1) / gain.size**0.5
        print(f"| {name} | {kappa:.2f} | {gain.mean():+.3f} | {error:.3f} |", flush=True)
    print("\n| test records | " + " | ".join(map(str, SAMPLE_SIZES)) + " |")
    print("| --- |" + " ---: |" * len(SAMPLE_SIZES))
    for name, (train, test) in settings(*tasks):
        if "noise" not in name and "drawn" not in name:
            cells = " | ".join(str(count_refusals(train, test, size)) for size in SAMPLE_SIZES)
            print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
