"""Compares gradient surgery with a plain mix, on two tasks that answer the same texts differently.

    python benchmarks/gradient_surgery.py --model MODEL --data FOLDER
        [--seeds 3] [--steps 150] [--classes 10] [--records 400] [--tests 200] [--uneven 4] [--learning-rate 5e-5]
        [--set train.KEY=VALUE …]

FOLDER holds ``banking77_train.csv`` and ``banking77_test.csv``. The task *intent* answers a customer's text with its
intent, the task *next* with the intent that follows in a fixed order; a word before the text says which. The second has
a record for every ``--uneven`` of the first, in each step and in the whole set, so that a plain mix learns it later.
A test record counts as right if every token of its answer is the most probable one. The table gives means over the
seeds, with standard deviations, on the same test texts: the loss in nats a token and the accuracy of each task, the
worse of the two accuracies, the share of steps whose tasks conflict, their mean cosine, and the seconds of a step.
"""

import argparse
import csv
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

METHODS = ("none", "pcgrad")
TASKS = ("intent", "next")


def read_texts(file: Path, classes: int) -> list[tuple[str, int, list[str]]]:
    """Returns the texts of the first classes with their class, and all names of classes."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [(row["text"], row["category"]) for row in csv.DictReader(lines)]
    names = sorted({name for _, name in rows})[:classes]
    return [(text, names.index(name), names) for text, name in rows if name in names]


def task_records(texts: list[tuple[str, int, list[str]]], task: str) -> list[dict[str, str]]:
    """Returns the records of one task."""
    shift = TASKS.index(task)
    return [
        {
            "prompt": f"{task}: {text}",
            "completion": names[(number + shift) % len(names)].replace("_", " "),
            "task": task,
        }
        for text, number, names in texts
    ]


@torch.no_grad()
def measure(folder: Path, records: list[dict[str, str]]) -> tuple[float, float]:
    """Returns the loss in nats a token, and the share of answers that greedy decoding gets right."""
    from posttrain.models.language_model import load_language_model
    from posttrain.models.task import TaskConfig

    lm = load_language_model(folder, TaskConfig(), "float32")
    loss, tokens, right = 0.0, 0, 0
    for record in records:
        example = lm.encode([{"role": "user", "content": record["prompt"]}], record["completion"])
        ids, supervised = torch.tensor([example.ids]), torch.tensor(example.supervised[1:])
        log_probs = lm.model(input_ids=ids.to(lm.device)).logits[0, :-1].float().log_softmax(-1).cpu()[supervised]
        targets = ids[0, 1:][supervised]
        loss -= float(log_probs.gather(-1, targets[:, None]).sum())
        tokens += len(targets)
        right += bool((log_probs.argmax(-1) == targets).all())
    return loss / tokens, right / len(records)


def run(arguments: argparse.Namespace, method: str, seed: int) -> dict[str, float]:
    """Trains once, and returns the row of the table."""
    from posttrain import train

    texts = read_texts(Path(arguments.data) / "banking77_train.csv", arguments.classes)
    tests = read_texts(Path(arguments.data) / "banking77_test.csv", arguments.classes)
    # Every n-th, as the files are sorted by class.
    texts = texts[:: max(1, len(texts) // arguments.records)][: arguments.records]
    tests = tests[:: max(1, len(tests) // arguments.tests)][: arguments.tests]
    records = task_records(texts, "intent") + task_records(texts[:: arguments.uneven], "next")
    weights = {"intent": float(arguments.uneven), "next": 1.0}
    settings: dict[str, Any] = {
        "batch_size": 20,
        "learning_rate": arguments.learning_rate,
        "phases": [{"mix": weights, "mix_by": "task", "steps": arguments.steps}],
        "surgery": {"method": method, "by": "task"} if method != "none" else {},
        "checkpoint": {"every_seconds": None},
    }
    for override in arguments.set:
        key, _, value = override.removeprefix("train.").partition("=")
        *path, name = key.split(".")
        section = settings
        for part in path:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value)
    with tempfile.TemporaryDirectory() as folder:
        result = train(arguments.model, records, Path(folder) / "out", settings={"seed": seed, "train": settings})
        row: dict[str, float] = {}
        for task in TASKS:
            row[f"{task} loss"], row[f"{task} right"] = measure(Path(folder) / "out", task_records(tests, task))
        steps = result.metrics
    row["worse right"] = min(row["intent right"], row["next right"])
    for name in ("gradient_conflicts", "gradient_cosine"):
        values = [step["metrics"][name] for step in steps if name in step["metrics"]]
        row[name.removeprefix("gradient_")] = statistics.mean(values) if values else float("nan")
    row["s/step"] = statistics.median(step["seconds"] for step in steps)
    return row


def main() -> None:
    """Trains every method with every seed, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--records", type=int, default=400)
    parser.add_argument("--tests", type=int, default=200)
    parser.add_argument("--uneven", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--set", action="append", default=[], metavar="train.KEY=VALUE")
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {method: [] for method in arguments.methods}
    # Methods in turn, so that a machine that slows down slows all of them.
    for seed in range(arguments.seeds):
        for method in arguments.methods:
            rows[method].append(run(arguments, method, seed))
            print(f"{method}, seed {seed}: {rows[method][-1]}", file=sys.stderr, flush=True)
    columns = list(rows[arguments.methods[0]][0])
    print("| method |", " | ".join(columns), "|")
    print("| --- |", " | ".join("---" for _ in columns), "|")
    for method, own in rows.items():
        print(f"| {method} |", " | ".join(summarize([row[name] for row in own]) for name in columns), "|")


def summarize(values: list[float]) -> str:
    """Formats mean and standard deviation; a dash where nothing was measured."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    spread = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.3f}{spread}"


if __name__ == "__main__":
    main()
