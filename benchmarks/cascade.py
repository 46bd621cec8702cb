"""Measures cost and accuracy of a cascade on Banking77: a linear head first, a language model for the rest.

    python benchmarks/cascade.py FOLDER --data DIR [--model smollm2-135m] [--intents 20] [--small 2] [--large 30]
        [--epochs 5] [--held-out 300] [--test 400] [--tolerance 0.03]

The task has the first ``--intents`` intents by the hash of their names. The small model is a linear head on MiniLM's
embeddings, trained on ``--small`` messages of each; the large one is ``--model``, fine-tuned on ``--large`` of each,
those of the small one among them. The threshold is the lowest at which the held-out messages show at 95% that the
cascade gets at most the share ``--tolerance`` wrong where the large model alone is right. Accuracy and cost are those
on the test messages, by ``posttrain eval --model ensemble.yaml``; all sets are drawn by the hash of the message. Prints
Markdown: each model alone, the chosen threshold, and the curve. The same command resumes an interrupted run. Nothing
else should run beside it: seconds are measured.
"""

import argparse
import csv
import hashlib
from pathlib import Path
from typing import Any

import yaml

from posttrain.inspect.evaluation import evaluate_model
from posttrain.loop.config import load_config
from posttrain.models.embedder import Embedder
from posttrain.models.linear_head import SETTINGS, fit_linear_head
from posttrain.store.workspace import Workspace
from posttrain.train import train

SYSTEM = "Name the intent of the message."

Messages = list[dict[str, str]]


def digest(text: str) -> str:
    """Orders texts at random, and the same way each time."""
    return hashlib.sha256(text.encode()).hexdigest()


def read(file: Path, intents: list[str] | None = None) -> Messages:
    """Reads messages, in the order of their hashes."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if intents is None or row["category"] in intents]
    return sorted(rows, key=lambda row: digest(row["text"]))


def write(file: Path, rows: Messages) -> None:
    """Writes messages as CSV."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, ["text", "category"])
        writer.writeheader()
        writer.writerows(rows)


def first_of_each(rows: Messages, count: int) -> Messages:
    """Returns the first messages of each intent."""
    seen: dict[str, int] = {}
    kept = []
    for row in rows:
        seen[row["category"]] = seen.get(row["category"], 0) + 1
        if seen[row["category"]] <= count:
            kept.append(row)
    return kept


def prepare(root: Path, arguments: argparse.Namespace) -> None:
    """Writes the workspace, and trains both models."""
    everything = read(arguments.data / "banking77_train.csv")
    intents = sorted({row["category"] for row in everything}, key=digest)[: arguments.intents]
    messages = [row for row in everything if row["category"] in intents]
    learned = first_of_each(messages, arguments.large)
    test = read(arguments.data / "banking77_test.csv", intents)[: arguments.test]
    # Banking77 has some messages in both files, and nothing may be measured on what was calibrated on.
    tested = {" ".join(row["text"].casefold().split()) for row in test}
    rest = [row for row in messages if row not in learned and " ".join(row["text"].casefold().split()) not in tested]
    write(root / "held_out.csv", rest[: arguments.held_out])
    write(root / "pool.csv", rest[arguments.held_out :])
    write(root / "test.csv", test)
    write(root / "learned.csv", learned)
    columns = {"prompt": "text", "completion": "category"}
    config = {
        "model": arguments.model,
        "task": {"system": SYSTEM, "labels": sorted(intents)},
        "data": {"pool": "pool.csv", "test": "test.csv", "columns": columns},
    }
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    ensemble = {"method": "cascade", "models": ["./head", "./large"], "tolerance": arguments.tolerance}
    ensemble |= {"data": "held_out.csv", "columns": columns}
    (root / "ensemble.yaml").write_text(yaml.safe_dump(ensemble, sort_keys=False), encoding="utf-8")
    if not (root / "head" / SETTINGS).exists():
        embedder = Embedder.load("minilm")
        rows = first_of_each(messages, arguments.small)
        texts = [row["text"] for row in rows]
        # As an ensemble embeds a record, whose prompt is one turn.
        fitted = fit_linear_head(
            embedder.embed(texts), [row["category"] for row in rows], sorted(intents), texts, embedder=embedder.key
        )
        assert fitted is not None, "there are messages of each intent"
        fitted.head.save(root / "head")
    settings: dict[str, Any] = {
        "task": {"system": SYSTEM},
        "columns": columns,
        "train": {"epochs": arguments.epochs, "learning_rate": 3.0e-4, "batch_size": 16},
    }
    train(arguments.model, root / "learned.csv", root / "large", settings=settings)


def main() -> None:
    """Trains, evaluates, and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    for name, default in {"intents": 20, "small": 2, "large": 30, "epochs": 5, "held-out": 300, "test": 400}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tolerance", type=float, default=0.03)
    arguments = parser.parse_args()
    root = arguments.folder.absolute()
    root.mkdir(parents=True, exist_ok=True)
    prepare(root, arguments)
    config = load_config(root)
    with Workspace.create(root, config.store) as store:
        report = evaluate_model(store, config, str(root / "ensemble.yaml"))["ensemble"]["test"]
    print("\n| model alone | accuracy | ms a message | MFLOPs a message |\n| --- | ---: | ---: | ---: |")
    names = ("linear head", arguments.model)
    for name, row in zip(names, report["models"], strict=True):
        print(f"| {name} | {row['accuracy']:.1%} | {1000 * row['seconds']:.1f} | {row['flops'] / 1e6:,.0f} |")
    print(f"\nChosen: {report['fitted']['why']}.\n")
    print("| threshold | answered by the head | accuracy | 95% interval | seconds saved | FLOPs saved |")
    print("| ---: | ---: | ---: | --- | ---: | ---: |")
    chosen = report["models"][0]["threshold"]
    for point in every(report["curve"], 16, chosen):
        mark = " (chosen)" if point["threshold"] == chosen else ""
        threshold = "the model alone" if point["threshold"] is None else f"{point['threshold']:g}"
        print(
            f"| {threshold}{mark} | {point['shares'][0]:.1%} | {point['accuracy']:.1%} |"
            f" {point['low']:.1%} to {point['high']:.1%} | {point['seconds_saved']:.1%} | {point['flops_saved']:.1%} |"
        )
    if chosen is not None:
        point = report["chosen"]
        print(f"\nAt the chosen threshold: accuracy {point['accuracy']:.1%}, {point['seconds_saved']:.1%} of the")
        print(f"seconds and {point['flops_saved']:.1%} of the FLOPs of {arguments.model} alone are saved.")


def every(curve: list[dict[str, Any]], count: int, chosen: float | None) -> list[dict[str, Any]]:
    """Returns points of the curve at even steps, its ends and the chosen one among them."""
    step = (len(curve) - 1) / max(1, min(count, len(curve)) - 1)
    rows = {round(index * step) for index in range(min(count, len(curve)))}
    rows |= {index for index, point in enumerate(curve) if point["threshold"] == chosen}
    return [curve[index] for index in sorted(rows)]


if __name__ == "__main__":
    main()
