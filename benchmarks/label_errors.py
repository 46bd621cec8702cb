"""How well are planted label errors found? Ours against cleanlab, on Banking77 with MiniLM features.

    python benchmarks/label_errors.py --data DIR --peer-python OTHER/bin/python [--seeds 3] [--rows N] [--features FILE]

``DIR`` holds ``banking77_train.csv``; the peer has a virtual environment of its own (``pip install cleanlab==2.9.0``).
A tenth of the labels is replaced: *even*, by any other label; *near*, by one of the five labels whose messages are most
alike, as people err. Banking77 has errors of its own, which count against everybody who finds them.

Two comparisons, medians over the seeds:

- *same predictions*: all judge the same probabilities out of fold, made by one logistic regression. The peer has every
  filter of its own; the first is its default. A filter's ranking is the peer's default, self-confidence; the two other
  rankings have rows of their own.
- *own predictions*: each makes its own from the features, by its defaults; the seconds are those of all that work.

``AP`` is the average precision of the ranking of all records.
"""

import argparse
import csv
import json
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import average_precision_score

from posttrain.data.labels.confident_learning import find_label_issues, self_confidence
from posttrain.data.labels.label_noise import assign_folds, audit_labels, fit_noise_channel, predict_out_of_fold

SHARE = 0.1
NEAR = 5


def read(path: Path, rows: int | None) -> tuple[list[str], np.ndarray]:
    """The messages and the number of each one's label; with ``rows``, every so many-th of them."""
    with path.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    found = found[:: max(1, len(found) // rows)] if rows else found
    _, labels = np.unique([row["category"] for row in found], return_inverse=True)
    return [row["text"] for row in found], labels


def embedded(texts: list[str], cache: Path | None) -> np.ndarray:
    """Float64 [N, 384]; from the cache where it holds as many."""
    if cache is not None and cache.exists() and len(found := np.load(cache)) == len(texts):
        return found.astype(np.float64)
    from posttrain.models.embedder import Embedder

    start = time.perf_counter()
    made = Embedder.load("minilm").embed(texts)
    print(f"embedded {len(texts):,} messages in {time.perf_counter() - start:.0f} s")
    if cache is not None:
        np.save(cache, made)
    return made.astype(np.float64)


def planted(kind: str, labels: np.ndarray, features: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which a tenth is wrong, and which are."""
    generator = np.random.default_rng([seed, kind == "near"])
    classes = labels.max() + 1
    wrong = np.zeros(len(labels), dtype=bool)
    wrong[generator.permutation(len(labels))[: round(SHARE * len(labels))]] = True
    given = labels.copy()
    if kind == "even":
        given[wrong] = (labels[wrong] + generator.integers(1, classes, wrong.sum())) % classes
    else:
        means = np.stack([features[labels == one].mean(axis=0) for one in range(classes)])
        distances = ((means[:, None] - means) ** 2).sum(axis=-1)
        np.fill_diagonal(distances, np.inf)
        given[wrong] = np.argsort(distances)[labels[wrong], generator.integers(0, NEAR, wrong.sum())]
    return given, wrong


def measured(wrong: np.ndarray, flagged: Any, scores: Any, seconds: float) -> list[float]:
    """Precision, recall, F1, average precision and seconds."""
    found = np.zeros(len(wrong), dtype=bool)
    found[flagged] = True
    hits = int((found & wrong).sum())
    precision, recall = hits / max(1, found.sum()), hits / wrong.sum()
    return [
        precision,
        recall,
        2 * hits / (found.sum() + wrong.sum()),
        float(average_precision_score(wrong, -np.asarray(scores))),
        seconds,
    ]


def main() -> None:
    """Run all and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--features", type=Path, help="where the embeddings are kept")
    arguments = parser.parse_args()
    texts, labels = read(arguments.data / "banking77_train.csv", arguments.rows)
    features = embedded(texts, arguments.features)
    command = [arguments.peer_python, str(Path(__file__).with_name("peers") / "cleanlab_labels.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        for kind in ("even", "near"):
            results: dict[str, list[list[float]]] = defaultdict(list)
            for seed in range(arguments.seeds):
                given, wrong = planted(kind, labels, features, seed)
                for name, values in one_planting(texts, features, given, wrong, peer).items():
                    results[name].append(values)
            show(kind, results)
        assert peer.stdin is not None
        peer.stdin.close()


def one_planting(
    texts: list[str], features: np.ndarray, given: np.ndarray, wrong: np.ndarray, peer: Any
) -> dict[str, list[float]]:
    """All ways on one planting."""
    probabilities = predict_out_of_fold(features, given, assign_folds(texts, given, 5))
    found = {}
    start = time.perf_counter()
    channel = fit_noise_channel(given, probabilities)
    seconds = time.perf_counter() - start
    flagged = np.flatnonzero(channel.correct < 0.5)
    found["same predictions: ours, likelihood (default)"] = measured(wrong, flagged, channel.correct, seconds)
    for rule in ("noise rate", "class", "both", "confident"):
        start = time.perf_counter()
        flagged = np.flatnonzero(find_label_issues(given, probabilities, rule))  # type: ignore[arg-type]
        seconds = time.perf_counter() - start
        scores = self_confidence(given, probabilities)
        found[f"same predictions: ours, {rule}"] = measured(wrong, flagged, scores, seconds)
    with tempfile.TemporaryDirectory() as folder:
        for name, array in {"features": features, "labels": given, "probabilities": probabilities}.items():
            np.save(Path(folder) / f"{name}.npy", array)
        peer.stdin.write(f"{folder}\n")
        peer.stdin.flush()
        theirs = json.loads(peer.stdout.readline())
    for name, one in theirs["filters"].items():
        scores = theirs["rankings"]["self_confidence"]
        shown = f"same predictions: cleanlab, {name}"
        found[shown] = measured(wrong, one["flagged"], scores, one["seconds"])
    for name in ("normalized_margin", "confidence_weighted_entropy"):
        nothing = float("nan")
        ranked = measured(wrong, [], theirs["rankings"][name], nothing)
        found[f"same predictions: cleanlab, ranked by {name}"] = [nothing, nothing, nothing, ranked[3], nothing]
    start = time.perf_counter()
    own = audit_labels(features, given, texts)
    seconds = time.perf_counter() - start
    flagged = np.flatnonzero(own.channel.correct < 0.5)
    found["own predictions: ours"] = measured(wrong, flagged, own.channel.correct, seconds)
    alone = theirs["own"]
    found["own predictions: cleanlab, CleanLearning"] = measured(
        wrong, alone["flagged"], alone["scores"], alone["seconds"]
    )
    return found


def show(kind: str, results: dict[str, list[list[float]]]) -> None:
    """A table of medians."""
    print(f"\n**{kind}**\n")
    print("| way | precision | recall | F1 | AP | seconds |\n| --- | --- | --- | --- | --- | --- |")
    for name, runs in results.items():
        *shares, seconds = (statistics.median(values) for values in zip(*runs, strict=True))
        cells = [f"{share:.3f}" if share == share else "" for share in shares]
        print(f"| {name} | {' | '.join(cells)} | {f'{seconds:.1f}' if seconds == seconds else ''} |", flush=True)


if __name__ == "__main__":
    main()
