"""How many labels does each strategy need? Ours against random, scikit-activeml and small-text.

    python benchmarks/label_efficiency.py --data DIR --peer-python OTHER/bin/python [--seeds 10] [--features FOLDER]
        [--tasks banking77,gsm8k] [--curves FILE.jsonl] [--pictures FOLDER]

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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from curve_pictures import draw

from posttrain.jobs.engines import open_engine
from posttrain.select.learning_curve import CurvePlan, CurveTask, full_accuracy, learning_curve
from posttrain.select.strategy_comparison import summarise

PEER = Path(__file__).parent / "peers" / "active_learning.py"
RECORDS = 5000
COUNTS = {"banking77": tuple(range(50, 651, 50)), "gsm8k": tuple(range(50, 1001, 50))}
FULL = "all labels"
PEERS = (
    *(f"scikit-activeml {name}" for name in ("CoreSet", "TypiClust", "ProbCover", "MaxHerding")),
    *(f"scikit-activeml {name}" for name in ("margin", "entropy", "BADGE", "Falcun", "CLUE")),
    *(f"small-text {name}" for name in ("greedy core-set", "lightweight core-set", "k-means")),
)
AS_THEY_ARE = {"dimensions": None}
OURS = {
    "auto": CurvePlan("auto", (), "auto", AS_THEY_ARE, AS_THEY_ARE),
    "random": CurvePlan("random", ()),
    "margin": CurvePlan("margin", ()),
    "entropy": CurvePlan("entropy", ()),
    "badge": CurvePlan("badge", ()),
    "uncertain_diverse": CurvePlan("uncertain_diverse", (), options=AS_THEY_ARE | {"by": "margin"}),
    "composite": CurvePlan("composite", (), options=AS_THEY_ARE | {"by": "margin"}),
    "diverse": CurvePlan("diverse", (), options=AS_THEY_ARE),
    "k_center": CurvePlan("k_center", (), options=AS_THEY_ARE),
    "prob_cover": CurvePlan("prob_cover", (), options=AS_THEY_ARE),
    "typiclust": CurvePlan("typiclust", (), options=AS_THEY_ARE),
    "facility_location": CurvePlan("facility_location", (), options=AS_THEY_ARE),
    "margin after facility_location": CurvePlan("margin", (), "facility_location", cold_options=AS_THEY_ARE),
    "facility_location by margin": CurvePlan(
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


def task_part(task: str, part: str, data: Path, features: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and labels of a task's part; the embeddings are kept in ``features`` if that is given."""
    texts, labels = records(task, data, part)
    return embedded(texts, features / f"{task}_{part}.npy" if features else None), labels


def tasks_of(name: str, arguments: argparse.Namespace) -> list[CurveTask]:
    features, labels = task_part(name, "train", arguments.data, arguments.features)
    test = task_part(name, "test", arguments.data, arguments.features)
    found = []
    for seed in range(arguments.seeds):
        rows = np.random.default_rng(seed).permutation(len(labels))[:RECORDS]
        found.append(CurveTask(features[rows], labels[rows], *test, int(labels.max()) + 1))
    return found


class Curves:
    """Learning curves by task, strategy and seed, kept in a file, so that none is drawn twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.known = {tuple(key): found for key, found in map(json.loads, lines)}

    def add(self, task: str, strategy: str, seed: int, accuracies: Sequence[float]) -> None:
        key = (task, strategy, seed)
        self.known[key] = list(accuracies)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, self.known[key]]) + "\n")

    def missing(self, task: str, strategies: Iterable[str], seed: int) -> list[str]:
        return [one for one in strategies if (task, one, seed) not in self.known]

    def stacked(self, task: str, strategy: str, seeds: int) -> np.ndarray:
        """Float64 [seeds, counts]."""
        return np.array([self.known[task, strategy, seed] for seed in range(seeds)])


def curve(work: tuple[str, CurveTask, CurvePlan, int]) -> tuple[str, int, list[float]]:
    label, task, plan, seed = work
    found = [full_accuracy(task)] if label == FULL else learning_curve(task, plan, seed).tolist()
    return label, seed, found


def peers(work: tuple[CurveTask, tuple[int, ...], int, list[str]], python: str) -> Iterator[tuple[str, list[float]]]:
    """Curves of peers for one seed, each as soon as it is there, in a process of their own."""
    task, counts, seed, names = work
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / str(seed)
        place.mkdir()
        for array in ("features", "labels", "test_features", "test_labels"):
            np.save(place / f"{array}.npy", getattr(task, array))
        command = [python, str(PEER), str(place), json.dumps(counts), ",".join(names)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                one = json.loads(line)
                yield one["strategy"], one["accuracies"]
        if process.returncode:
            raise SystemExit(f"the peers ended with code {process.returncode}")


def main() -> None:
    """Run both tasks and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tasks", default="banking77,gsm8k")
    parser.add_argument("--features", type=Path, help="where the embeddings are kept")
    parser.add_argument("--curves", type=Path, default=Path("curves.jsonl"), help="where the curves are kept")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each task's curves")
    arguments = parser.parse_args()
    kept = Curves(arguments.curves)
    for name in arguments.tasks.split(","):
        counts, tasks = COUNTS[name], tasks_of(name, arguments)
        plans = {label: replace(plan, counts=counts) for label, plan in OURS.items()}
        work = [
            (label, task, plans.get(label, plans["random"]), seed)
            for seed, task in enumerate(tasks)
            for label in kept.missing(name, [*plans, FULL], seed)
        ]
        with open_engine("processes", 2) as engine:
            for label, seed, found in engine.map(curve, work):
                kept.add(name, label, seed, found)
        theirs = PEERS if arguments.peer_python else ()
        left = [(task, counts, seed, kept.missing(name, theirs, seed)) for seed, task in enumerate(tasks)]

        def run(one: tuple[CurveTask, tuple[int, ...], int, list[str]], name: str = name) -> None:
            for label, found in peers(one, arguments.peer_python):
                kept.add(name, label, one[2], found)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(run, [one for one in left if one[3]]))
        curves = {label: kept.stacked(name, label, arguments.seeds) for label in (*plans, *theirs)}
        targets = (0.8 * kept.stacked(name, FULL, arguments.seeds)[:, 0]).tolist()
        report(name, counts, curves, targets)
        if arguments.pictures:
            shown = best_of(curves, list(plans), 5) | best_of(curves, list(theirs), 3) | {"random": curves["random"]}
            picture = arguments.pictures / f"label-efficiency-{name}.svg"
            draw(picture, f"accuracy by labels, {name}", counts, shown, theirs, float(np.mean(targets)))


def best_of(curves: dict[str, np.ndarray], names: list[str], n: int) -> dict[str, np.ndarray]:
    """The curves with the greatest area."""
    best = sorted(names, key=lambda name: -curves[name].mean())[:n]
    return {name: curves[name] for name in best}


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
