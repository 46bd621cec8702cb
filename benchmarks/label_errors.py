"""Measures how well planted label errors are found, against cleanlab, on Banking77 with MiniLM features.

    python benchmarks/label_errors.py --data DIR --peer-python OTHER/bin/python [--seeds 3] [--rows N] [--features FILE]

``DIR`` holds ``banking77_train.csv``; the peer has a virtual environment of its own (``pip install cleanlab==2.9.0``).
A tenth of the labels is replaced: *even*, by any other label; *near*, by one of the five labels with the most similar
messages, as annotators err. Banking77 has errors of its own, which count as false alarms of the method that finds them.

Two comparisons, medians over the seeds:

- *same predictions*: all methods judge the same out-of-fold probabilities of one logistic regression. The peer has a
  row for each of its filters; the first is its default. A filter's ranking is the peer's default, self-confidence; the
  two other rankings have rows of their own.
- *own predictions*: each program makes its own from the features, by its defaults; the seconds include that.

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

from posttrain.data.labels.label_noise import audit_labels, fit_noise_channel
from posttrain.models.linear_head import assign_folds, predict_out_of_fold

SHARE = 0.1
NEAR_CLASSES = 5


def read_banking77(path: Path, rows: int | None) -> tuple[list[str], np.ndarray]:
    """Read the messages and their class indices; with ``rows``, about so many of them, evenly spaced in the file."""
    with path.open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
    records = records[:: max(1, len(records) // rows)] if rows else records
    _, labels = np.unique([row["category"] for row in records], return_inverse=True)
    return [row["text"] for row in records], labels


def embed_texts(texts: list[str], cache: Path | None) -> np.ndarray:
    """Return MiniLM's embeddings, float64 [N, 384]; from the cache if it holds as many."""
    if cache is not None and cache.exists() and len(cached_embeddings := np.load(cache)) == len(texts):
        return cached_embeddings.astype(np.float64)
    from posttrain.models.embedder import Embedder

    start = time.perf_counter()
    embeddings = Embedder.load("minilm").embed(texts)
    print(f"embedded {len(texts):,} messages in {time.perf_counter() - start:.0f} s")
    if cache is not None:
        np.save(cache, embeddings)
    return embeddings.astype(np.float64)


def plant_errors(kind: str, labels: np.ndarray, features: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Replace a tenth of the labels; return the noisy labels, and bool [N], the wrong ones."""
    generator = np.random.default_rng([seed, kind == "near"])
    classes = labels.max() + 1
    is_wrong = np.zeros(len(labels), dtype=bool)
    is_wrong[generator.permutation(len(labels))[: round(SHARE * len(labels))]] = True
    noisy_labels = labels.copy()
    if kind == "even":
        noisy_labels[is_wrong] = (labels[is_wrong] + generator.integers(1, classes, is_wrong.sum())) % classes
    else:
        means = np.stack([features[labels == label].mean(axis=0) for label in range(classes)])
        distances = ((means[:, None] - means) ** 2).sum(axis=-1)
        np.fill_diagonal(distances, np.inf)
        ranks = generator.integers(0, NEAR_CLASSES, is_wrong.sum())
        noisy_labels[is_wrong] = np.argsort(distances)[labels[is_wrong], ranks]
    return noisy_labels, is_wrong


def evaluate(is_wrong: np.ndarray, flagged_rows: Any, scores: Any, seconds: float) -> list[float]:
    """Return precision, recall, F1, average precision and seconds."""
    is_flagged = np.zeros(len(is_wrong), dtype=bool)
    is_flagged[flagged_rows] = True
    hits = int((is_flagged & is_wrong).sum())
    precision, recall = hits / max(1, is_flagged.sum()), hits / is_wrong.sum()
    return [
        precision,
        recall,
        2 * hits / (is_flagged.sum() + is_wrong.sum()),
        float(average_precision_score(is_wrong, -np.asarray(scores))),
        seconds,
    ]


def main() -> None:
    """Run both kinds of noise and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--features", type=Path, help="file that caches the embeddings")
    arguments = parser.parse_args()
    texts, labels = read_banking77(arguments.data / "banking77_train.csv", arguments.rows)
    features = embed_texts(texts, arguments.features)
    command = [arguments.peer_python, str(Path(__file__).with_name("peers") / "cleanlab_labels.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        for kind in ("even", "near"):
            results: dict[str, list[list[float]]] = defaultdict(list)
            for seed in range(arguments.seeds):
                noisy_labels, is_wrong = plant_errors(kind, labels, features, seed)
                for name, values in run_methods(texts, features, noisy_labels, is_wrong, peer).items():
                    results[name].append(values)
            print_table(kind, results)
        assert peer.stdin is not None
        peer.stdin.close()


def run_methods(
    texts: list[str], features: np.ndarray, noisy_labels: np.ndarray, is_wrong: np.ndarray, peer: Any
) -> dict[str, list[float]]:
    """Evaluate all methods on the labels of one seed."""
    probabilities = predict_out_of_fold(features, noisy_labels, assign_folds(texts, noisy_labels, 5))
    results = {}
    start = time.perf_counter()
    channel = fit_noise_channel(noisy_labels, probabilities)
    seconds = time.perf_counter() - start
    flagged_rows = np.flatnonzero(channel.correct < 0.5)
    results["same predictions: ours"] = evaluate(is_wrong, flagged_rows, channel.correct, seconds)
    with tempfile.TemporaryDirectory() as folder:
        for name, array in {"features": features, "labels": noisy_labels, "probabilities": probabilities}.items():
            np.save(Path(folder) / f"{name}.npy", array)
        peer.stdin.write(f"{folder}\n")
        peer.stdin.flush()
        answer = json.loads(peer.stdout.readline())
    for name, issues in answer["filters"].items():
        scores = answer["rankings"]["self_confidence"]
        row_name = f"same predictions: cleanlab, {name}"
        results[row_name] = evaluate(is_wrong, issues["flagged"], scores, issues["seconds"])
    for name in ("normalized_margin", "confidence_weighted_entropy"):
        nan = float("nan")
        measures = evaluate(is_wrong, [], answer["rankings"][name], nan)
        results[f"same predictions: cleanlab, ranked by {name}"] = [nan, nan, nan, measures[3], nan]
    start = time.perf_counter()
    channel = audit_labels(features, noisy_labels, texts)
    seconds = time.perf_counter() - start
    flagged_rows = np.flatnonzero(channel.correct < 0.5)
    results["own predictions: ours"] = evaluate(is_wrong, flagged_rows, channel.correct, seconds)
    clean_learning = answer["own"]
    results["own predictions: cleanlab, CleanLearning"] = evaluate(
        is_wrong, clean_learning["flagged"], clean_learning["scores"], clean_learning["seconds"]
    )
    return results


def print_table(kind: str, results: dict[str, list[list[float]]]) -> None:
    """Print a table of medians over the seeds."""
    print(f"\n**{kind}**\n")
    print("| way | precision | recall | F1 | AP | seconds |\n| --- | --- | --- | --- | --- | --- |")
    for name, runs in results.items():
        *shares, seconds = (statistics.median(values) for values in zip(*runs, strict=True))
        cells = [f"{share:.3f}" if share == share else "" for share in shares]
        print(f"| {name} | {' | '.join(cells)} | {f'{seconds:.1f}' if seconds == seconds else ''} |", flush=True)


if __name__ == "__main__":
    main()
