"""From which agreement of neighbours' labels on does covering the pool beat drawing at random?

    python benchmarks/shared_labels.py --data DIR [--seeds 3] [--features FOLDER]

``DIR`` as for label_efficiency.py. Banking77 with ever more noise on MiniLM's embeddings, or on the labels, its intents
in five groups, and GSM8K's classes. ``kappa`` is that of 500 test records, by which ``auto`` decides; ``gain`` is how
much more accurate a logistic regression is on labels that facility location chose than on as many drawn at random, the
mean over seeds, and ``error`` its standard error over them and all counts. A second table says in how many of 20
samples of test records kappa was too small for ``auto`` to cover, were there no least number of them.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from label_efficiency import AS_THEY_ARE, RECORDS, task_part

from posttrain.select.learning_curve import CurvePlan, CurveTask, learning_curve
from posttrain.select.strategy import MAX_AGREEMENT_RECORDS, neighbour_agreement

COUNTS = (50, 100, 200, 400)
SIZES = (50, 100, 150, 200, 500)
SAMPLES, POOL = 20, 1200
Rows = tuple[np.ndarray, np.ndarray]


def noisy(rows: Rows, share: float, seed: int) -> Rows:
    """Embeddings with Gaussian noise of so many times their length."""
    points, labels = rows
    noise = np.random.default_rng(seed).normal(size=points.shape) / points.shape[1] ** 0.5
    moved = points + share * noise
    return (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float32), labels


def flipped(rows: Rows, share: float, seed: int) -> Rows:
    """A share of the labels drawn anew."""
    generator = np.random.default_rng(seed)
    points, labels = rows
    drawn = generator.integers(labels.max() + 1, size=len(labels))
    return points, np.where(generator.random(len(labels)) < share, drawn, labels)


def settings(banking: tuple[Rows, Rows], gsm8k: tuple[Rows, Rows]) -> Iterator[tuple[str, tuple[Rows, Rows]]]:
    yield "Banking77", banking
    for share in (1, 2, 3, 5):
        yield f"Banking77, noise {share} times as long", tuple(noisy(one, share, at) for at, one in enumerate(banking))
    for share in (0.3, 0.6, 0.8):
        yield (
            f"Banking77, {share:.0%} of the labels drawn",
            tuple(flipped(one, share, at) for at, one in enumerate(banking)),
        )
    groups = np.random.default_rng(3).integers(5, size=77)
    yield "Banking77, five groups of intents", tuple((points, groups[labels]) for points, labels in banking)
    yield "GSM8K, five classes", gsm8k


def gains(train: Rows, test: Rows, seeds: int) -> np.ndarray:
    """Float64 [seeds, counts]."""
    found = []
    for seed in range(seeds):
        rows = np.random.default_rng(seed).permutation(len(train[1]))[:RECORDS]
        task = CurveTask(train[0][rows], train[1][rows], *test, classes=int(train[1].max()) + 1)
        plans = CurvePlan("facility_location", COUNTS, options=AS_THEY_ARE), CurvePlan("random", COUNTS)
        chosen, drawn = (learning_curve(task, plan, seed) for plan in plans)
        found.append(chosen - drawn)
    return np.array(found)


def refused(train: Rows, test: Rows, size: int) -> int:
    """In how many samples kappa is surely below the bar."""
    found = 0
    for seed in range(SAMPLES):
        generator = np.random.default_rng(seed)
        rows, pool = generator.permutation(len(test[1]))[:size], generator.permutation(len(train[1]))[:POOL]
        agreement = neighbour_agreement(test[0][rows], test[1][rows], train[0][pool])
        found += not replace(agreement, records=MAX_AGREEMENT_RECORDS).shared
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--features", type=Path, help="where the embeddings are kept")
    arguments = parser.parse_args()
    tasks = [
        (
            task_part(task, "train", arguments.data, arguments.features),
            task_part(task, "test", arguments.data, arguments.features),
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
    print("\n| test records | " + " | ".join(map(str, SIZES)) + " |")
    print("| --- |" + " ---: |" * len(SIZES))
    for name, (train, test) in settings(*tasks):
        if "noise" not in name and "drawn" not in name:
            print(f"| {name} | " + " | ".join(str(refused(train, test, size)) for size in SIZES) + " |", flush=True)


if __name__ == "__main__":
    main()
