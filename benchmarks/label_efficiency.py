"""Compares the labels that each strategy needs: ours, random, scikit-activeml's and small-text's.

    python benchmarks/label_efficiency.py --data DIR --peer-python OTHER/bin/python [--seeds 10] [--features FOLDER]
        [--tasks banking77,gsm8k] [--curves FILE.jsonl] [--pictures FOLDER]

``DIR`` holds ``banking77_train.csv``, ``banking77_test.csv``, ``gsm8k_train.jsonl`` and ``gsm8k_test.jsonl``. There are
two tasks on MiniLM's embeddings with a logistic regression: Banking77's 77 intents, and the number of calculations in
the answer to a question of GSM8K (up to two, three, four, five, six or more). Each strategy requests 50 labels at a
time from the same 5,000 records of each seed, and is measured on all test records.

Strategies that use a model's predictions start from 50 labels drawn at random, both ours and the peers'; the others
choose their first labels themselves. ``area`` is the mean accuracy under the curve; ``labels`` is the number of labels
at which the curve reaches 80% of the accuracy with all 5,000; ``p`` is the p-value of the paired difference of areas to
random over seeds, by a sign-flip test.
"""

import argparse
import csv
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from curve_pictures import draw

from posttrain.jobs.map import open_engine
from posttrain.select.learning_curve import CurvePlan, CurveTask, full_accuracy, learning_curve
from posttrain.select.strategy_comparison import summarise

PEER_SCRIPT = Path(__file__).parent / "peers" / "active_learning.py"
RECORDS = 5000
LABEL_COUNTS = {"banking77": tuple(range(50, 651, 50)), "gsm8k": tuple(range(50, 1001, 50))}
FULL_ACCURACY = "all labels"
PEER_STRATEGIES = (
    *(f"scikit-activeml {name}" for name in ("CoreSet", "TypiClust", "ProbCover", "MaxHerding")),
    *(f"scikit-activeml {name}" for name in ("margin", "entropy", "BADGE", "Falcun", "CLUE")),
    *(f"small-text {name}" for name in ("greedy core-set", "lightweight core-set", "k-means")),
)
UNREDUCED = {"dimensions": None}
"""The option that leaves the embeddings as they are: no principal components."""
OURS = {
    "auto": CurvePlan("auto", (), UNREDUCED),
    "random": CurvePlan("random", ()),
    "margin": CurvePlan("margin", (), start="random"),
    "entropy": CurvePlan("entropy", (), start="random"),
    "badge": CurvePlan("badge", (), start="random"),
    "uncertain_diverse": CurvePlan("uncertain_diverse", (), UNREDUCED | {"by": "margin"}, start="random"),
    "diverse": CurvePlan("diverse", (), options=UNREDUCED),
    "typiclust": CurvePlan("typiclust", (), options=UNREDUCED),
    "facility_location": CurvePlan("facility_location", (), options=UNREDUCED),
    "margin after facility_location": CurvePlan("margin", (), {}, "facility_location", UNREDUCED),
    "facility_location by margin": CurvePlan("facility_location", (), UNREDUCED | {"by": "margin"}),
}


def records(task: str, folder: Path, split: str) -> tuple[list[str], np.ndarray]:
    """Read the texts and class indices of a split of a task."""
    if task == "banking77":
        with (folder / f"banking77_{split}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return [row["text"] for row in rows], np.unique([row["category"] for row in rows], return_inverse=True)[1]
    lines = (folder / f"gsm8k_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines]
    calculations = np.array([row["answer"].count("<<") for row in problems])
    return [row["question"] for row in problems], np.clip(calculations, 2, 6) - 2


def embed_texts(texts: list[str], cache: Path | None) -> np.ndarray:
    """Return MiniLM's embeddings, float32 [N, 384] of length 1; from the cache if it holds as many."""
    if cache is not None and cache.exists():
        cached_embeddings: np.ndarray = np.load(cache)
        if len(cached_embeddings) == len(texts):
            return cached_embeddings
    from posttrain.models.embedder import Embedder

    embeddings: np.ndarray = Embedder.load("minilm").embed(texts).astype(np.float32)
    if cache is not None:
        np.save(cache, embeddings)
    return embeddings


def task_split(task: str, split: str, data: Path, features: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings and labels of a split of a task; the folder ``features`` caches the embeddings."""
    texts, labels = records(task, data, split)
    return embed_texts(texts, features / f"{task}_{split}.npy" if features else None), labels


def curve_tasks(name: str, arguments: argparse.Namespace) -> list[CurveTask]:
    """Return the task of each seed, with training records of its own."""
    features, labels = task_split(name, "train", arguments.data, arguments.features)
    test = task_split(name, "test", arguments.data, arguments.features)
    tasks = []
    for seed in range(arguments.seeds):
        rows = np.random.default_rng(seed).permutation(len(labels))[:RECORDS]
        tasks.append(CurveTask(features[rows], labels[rows], *test, int(labels.max()) + 1))
    return tasks


class CurveStore:
    """Stores learning curves by task, strategy and seed in a file, so that none is computed twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.curves = {tuple(key): accuracies for key, accuracies in map(json.loads, lines)}

    def add(self, task: str, strategy: str, seed: int, accuracies: Sequence[float]) -> None:
        key = (task, strategy, seed)
        self.curves[key] = list(accuracies)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, self.curves[key]]) + "\n")

    def missing(self, task: str, strategies: Iterable[str], seed: int) -> list[str]:
        return [strategy for strategy in strategies if (task, strategy, seed) not in self.curves]

    def stack(self, task: str, strategy: str, seeds: int) -> np.ndarray:
        """Return the curves of all seeds, float64 [seeds, counts]."""
        return np.array([self.curves[task, strategy, seed] for seed in range(seeds)])


def run_ours(job: tuple[str, CurveTask, CurvePlan, int]) -> tuple[str, int, list[float]]:
    """Compute one of our curves; return its strategy, seed and accuracies."""
    strategy, task, plan, seed = job
    accuracies = [full_accuracy(task)] if strategy == FULL_ACCURACY else learning_curve(task, plan, seed).tolist()
    return strategy, seed, accuracies


def run_peers(job: tuple[CurveTask, tuple[int, ...], int, list[str]], python: str) -> Iterator[tuple[str, list[float]]]:
    """Run the peers on one seed in a process of their own; yield each strategy and its curve as soon as it is done."""
    task, counts, seed, strategies = job
    with tempfile.TemporaryDirectory() as folder:
        seed_folder = Path(folder) / str(seed)
        seed_folder.mkdir()
        for array in ("features", "labels", "test_features", "test_labels"):
            np.save(seed_folder / f"{array}.npy", getattr(task, array))
        command = [python, str(PEER_SCRIPT), str(seed_folder), json.dumps(counts), ",".join(strategies)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                yield row["strategy"], row["accuracies"]
        if process.returncode:
            raise SystemExit(f"the peers exited with code {process.returncode}")


def main() -> None:
    """Run both tasks and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tasks", default="banking77,gsm8k")
    parser.add_argument("--features", type=Path, help="folder that caches the embeddings")
    parser.add_argument("--curves", type=Path, default=Path("curves.jsonl"), help="file that stores the curves")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each task's curves")
    arguments = parser.parse_args()
    store = CurveStore(arguments.curves)
    for name in arguments.tasks.split(","):
        counts, tasks = LABEL_COUNTS[name], curve_tasks(name, arguments)
        plans = {strategy: replace(plan, counts=counts) for strategy, plan in OURS.items()}
        jobs = [
            (strategy, task, plans.get(strategy, plans["random"]), seed)
            for seed, task in enumerate(tasks)
            for strategy in store.missing(name, [*plans, FULL_ACCURACY], seed)
        ]
        with open_engine("processes", 2) as engine:
            for strategy, seed, accuracies in engine.map(run_ours, jobs):
                store.add(name, strategy, seed, accuracies)
        peers = PEER_STRATEGIES if arguments.peer_python else ()
        peer_jobs = [(task, counts, seed, store.missing(name, peers, seed)) for seed, task in enumerate(tasks)]

        def run(job: tuple[CurveTask, tuple[int, ...], int, list[str]], name: str = name) -> None:
            for strategy, accuracies in run_peers(job, arguments.peer_python):
                store.add(name, strategy, job[2], accuracies)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(run, [job for job in peer_jobs if job[3]]))
        curves = {strategy: store.stack(name, strategy, arguments.seeds) for strategy in (*plans, *peers)}
        targets = (0.8 * store.stack(name, FULL_ACCURACY, arguments.seeds)[:, 0]).tolist()
        print_table(name, counts, curves, targets)
        if arguments.pictures:
            best = best_curves(curves, list(plans), 5) | best_curves(curves, list(peers), 3)
            picture = arguments.pictures / f"label-efficiency-{name}.svg"
            selected = best | {"random": curves["random"]}
            draw(picture, f"accuracy by labels, {name}", counts, selected, peers, float(np.mean(targets)))


def best_curves(curves: dict[str, np.ndarray], names: list[str], n: int) -> dict[str, np.ndarray]:
    """Return the n curves with the greatest area among those named."""
    best = sorted(names, key=lambda name: -curves[name].mean())[:n]
    return {name: curves[name] for name in best}


def print_table(name: str, counts: tuple[int, ...], curves: dict[str, np.ndarray], targets: list[float]) -> None:
    """Print a row for each strategy."""
    summaries = summarise(counts, curves, targets, "random")
    random_labels = next(summary.labels for summary in summaries if summary.strategy == "random")
    print(f"\n**{name}**, accuracy with all labels {np.mean(targets) / 0.8:.3f}\n")
    columns = [count for count in counts if count in (50, 100, 200, 300, 400, 500, 600, 1000)]
    print("| strategy | area | p | labels | of random's | " + " | ".join(map(str, columns)) + " |")
    print("| --- |" + " ---: |" * (4 + len(columns)))
    for summary in summaries:
        share = f"{summary.labels / random_labels:.0%}" if summary.labels and random_labels else ""
        labels = f"{summary.labels:.0f}" if summary.labels else "more"
        p = "" if summary.p_value is None else f"{summary.p_value:.3f}"
        cells = " | ".join(f"{summary.accuracy[counts.index(count)]:.3f}" for count in columns)
        print(f"| {summary.strategy} | {summary.area:.4f} | {p} | {labels} | {share} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
