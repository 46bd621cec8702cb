"""How many labels does each strategy need? Ours against random, scikit-activeml and small-text.

    python benchmarks/label_efficiency.py --data DIR --peer-python OTHER/bin/python [--seeds 10] [--features FOLDER]
        [--tasks banking77,gsm8k] [--curves FILE.json]

``DIR`` holds ``banking77_train.csv``, ``banking77_test.csv``, ``gsm8k_train.jsonl`` and ``gsm8k_test.jsonl``. Two tasks
on MiniLM's embeddings with a logistic regression: Banking77's 77 intents, and how many calculations the answer to a
question of GSM8K takes (up to two, three, four, five, six or more). Labels are asked for 50 at a time; every strategy
sees the same 5,000 records of each seed, and is measured on all test records.

Strategies that go by a model's predictions start from 50 labels drawn at random, both ours and the peers'; those that
need none start by themselves. ``area`` is the mean accuracy under the curve; ``labels`` is how many it takes to reach
80% of the accuracy with all 5,000; ``p`` is that of the paired difference of areas to random over seeds, by a sign-flip
test.
"""

import argparse
import csv
import json
import subprocess
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from posttrain.jobs.engine import open_engine
from posttrain.select.compare.curves import Plan, Task, full_accuracy, learning_curve
from posttrain.select.compare.summary import summarise

PEER = Path(__file__).parent / "peers" / "active_learning.py"
RECORDS = 5000
COUNTS = {"banking77": tuple(range(50, 651, 50)), "gsm8k": tuple(range(50, 1001, 50))}
AS_THEY_ARE = {"dimensions": None}
OURS = {
    "random": Plan("random", ()),
    "margin": Plan("margin", ()),
    "entropy": Plan("entropy", ()),
    "badge": Plan("badge", ()),
    "uncertain_diverse": Plan("uncertain_diverse", (), options=AS_THEY_ARE | {"by": "margin"}),
    "composite": Plan("composite", (), options=AS_THEY_ARE | {"by": "margin"}),
    "diverse": Plan("diverse", (), options=AS_THEY_ARE),
    "k_center": Plan("k_center", (), options=AS_THEY_ARE),
    "prob_cover": Plan("prob_cover", (), options=AS_THEY_ARE),
    "typiclust": Plan("typiclust", (), options=AS_THEY_ARE),
    "facility_location": Plan("facility_location", (), options=AS_THEY_ARE),
    "margin after facility_location": Plan("margin", (), "facility_location", cold_options=AS_THEY_ARE),
    "facility_location by margin": Plan(
        "facility_location", (), "facility_location", AS_THEY_ARE | {"by": "margin"}, AS_THEY_ARE
    ),
}


def records(task: str, folder: Path, part: str) -> tuple[list[str], np.ndarray]:
    if task == "banking77":
        with (folder / f"banking77_{part}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return [row["text"] for row in rows], np.unique([row["category"] for row in rows], return_inverse=True)[1]
    lines = (folder / f"gsm8k_{part}.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    calculations = np.array([row["answer"].count("<<") for row in found])
    return [row["question"] for row in found], np.clip(calculations, 2, 6) - 2


def embedded(texts: list[str], cache: Path | None) -> np.ndarray:
    """Float32 [N, 384] of length 1; from the cache where it holds as many."""
    if cache is not None and cache.exists():
        found: np.ndarray = np.load(cache)
        if len(found) == len(texts):
            return found
    from posttrain.models.embedder import Embedder

    made: np.ndarray = Embedder.load("minilm").embed(texts).astype(np.float32)
    if cache is not None:
        np.save(cache, made)
    return made


def tasks_of(name: str, arguments: argparse.Namespace) -> list[Task]:
    arrays = {}
    for part in ("train", "test"):
        texts, labels = records(name, arguments.data, part)
        cache = arguments.features / f"{name}_{part}.npy" if arguments.features else None
        arrays[part] = embedded(texts, cache), labels
    features, labels = arrays["train"]
    found = []
    for seed in range(arguments.seeds):
        rows = np.random.default_rng(seed).permutation(len(labels))[:RECORDS]
        found.append(Task(features[rows], labels[rows], *arrays["test"], int(labels.max()) + 1))
    return found


def curve(work: tuple[Task, Plan, int]) -> np.ndarray:
    return learning_curve(*work)


def full(task: Task) -> float:
    return full_accuracy(task)


def peers(work: tuple[Task, tuple[int, ...], int, str]) -> dict[str, list[float]]:
    """Curves of all peers for one seed, in a process of their own."""
    task, counts, seed, python = work
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / str(seed)
        folder.mkdir()
        for array in ("features", "labels", "test_features", "test_labels"):
            np.save(folder / f"{array}.npy", getattr(task, array))
        command = [python, str(PEER), str(folder), json.dumps(counts)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {one["strategy"]: one["accuracies"] for one in map(json.loads, done.stdout.splitlines())}


def main() -> None:
    """Run both tasks and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tasks", default="banking77,gsm8k")
    parser.add_argument("--features", type=Path, help="where the embeddings are kept")
    parser.add_argument("--curves", type=Path, help="JSON file for all curves")
    arguments = parser.parse_args()
    everything = {}
    for name in arguments.tasks.split(","):
        counts, tasks = COUNTS[name], tasks_of(name, arguments)
        curves = defaultdict(list)
        with open_engine("processes", 2) as engine:
            plans = [(label, replace(p, counts=counts)) for label, p in OURS.items()]
            work = [(task, plan, seed) for seed, task in enumerate(tasks) for _, plan in plans]
            labels = [label for _ in tasks for label, _ in plans]
            for label, found in zip(labels, engine.map(curve, work), strict=True):
                curves[label].append(found)
            targets = [0.8 * one for one in engine.map(full, tasks)]
        if arguments.peer_python:
            with ThreadPoolExecutor(2) as threads:
                given = [(task, counts, seed, arguments.peer_python) for seed, task in enumerate(tasks)]
                for answers in threads.map(peers, given):
                    for label, accuracies in answers.items():
                        curves[label].append(np.array(accuracies))
        stacked = {label: np.stack(rows) for label, rows in curves.items()}
        everything[name] = {"counts": counts, "curves": {label: rows.tolist() for label, rows in stacked.items()}}
        report(name, counts, stacked, targets)
    if arguments.curves:
        arguments.curves.write_text(json.dumps(everything))


def report(name: str, counts: tuple[int, ...], curves: dict[str, np.ndarray], targets: list[float]) -> None:
    summaries = summarise(counts, curves, targets, "random")
    base = next(one.labels for one in summaries if one.strategy == "random")
    print(f"\n**{name}**, with all labels {np.mean(targets) / 0.8:.3f}\n")
    shown = [count for count in counts if count in (50, 100, 200, 300, 400, 500, 600, 1000)]
    print("| strategy | area | p | labels | of random's | " + " | ".join(map(str, shown)) + " |")
    print("| --- |" + " ---: |" * (4 + len(shown)))
    for one in summaries:
        share = f"{one.labels / base:.0%}" if one.labels and base else ""
        needed = f"{one.labels:.0f}" if one.labels else "more"
        p = "" if one.p_value is None else f"{one.p_value:.3f}"
        at = " | ".join(f"{one.accuracy[counts.index(count)]:.3f}" for count in shown)
        print(f"| {one.strategy} | {one.area:.4f} | {p} | {needed} | {share} | {at} |", flush=True)


if __name__ == "__main__":
    main()
