"""Measures what hard negatives bring on Banking77's most confused pairs of intents.

    python benchmarks/hard_negatives.py FOLDER --data DIR [--seeds 3] [--per-intent 15] [--epochs 5]

The pairs are those that a linear head on MiniLM's embeddings confuses most: it learns from 20 messages an intent of the
training file, and its errors are counted on all others of that file; the test file is read for the last figures only.
From then on there are the intents of these pairs alone. For each seed ``--per-intent`` messages of each are drawn from
the training file, and every arm trains the base model on the same ones, for the same number of optimiser steps:

- ``sft``: on the labels;
- ``random``: ORPO on pairs of the label and another one, drawn at random;
- ``hard``: ORPO on the pairs of `posttrain.loop.stages.negatives`: the label against that of the nearest record of an
  intent that is confused with it.

So ``hard`` against ``random`` is what hard negatives bring, and ``random`` against ``sft`` what the objective does.
``accuracy`` is that on all test messages of these intents; ``confused`` is the share of them that get the other label
of one of their pairs. The last rows are means over seeds, with intervals by Student's t; differences are by seed.
The same command resumes an interrupted run: a training from its checkpoints, and what is measured is kept.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.data.reading.reader import read
from posttrain.data.records.record import assign_ids, concat
from posttrain.data.versions.export import export_file
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.suite import run_suite
from posttrain.loop.stages.negatives import pair_records
from posttrain.models.embedder import Embedder
from posttrain.models.language_model import load_language_model
from posttrain.models.linear_head import fit_linear_head
from posttrain.models.precision import choose_precision
from posttrain.models.task import TaskConfig
from posttrain.select.hard_negatives import Confusions, confused_labels
from posttrain.store.files import write_atomically
from posttrain.train.api import train

COLUMNS = {"prompt": "text", "completion": "category"}
SYSTEM = "Name the intent of the message."
HEAD_LABELS = 20  # messages an intent that the head learns from


def embed(records: pa.Table) -> np.ndarray:
    """Embeds the messages by MiniLM, float32 [N, D]."""
    return np.asarray(Embedder.load("minilm").embed([turns[-1]["content"] for turns in records["prompt"].to_pylist()]))


def draw(records: pa.Table, per_intent: int, seed: int) -> np.ndarray:
    """Draws rows, int64: ``per_intent`` of each intent, or all that there are."""
    answers = np.array(records["completion"].to_pylist())
    order = np.random.default_rng(seed).permutation(records.num_rows)
    rows = [order[answers[order] == name][:per_intent] for name in np.unique(answers)]
    return np.sort(np.concatenate(rows))


def most_confused(records: pa.Table, folder: Path, count: int) -> Confusions:
    """Returns the pairs of intents that a linear head confuses most on training messages that it has not seen."""
    file = folder / f"confused-{count}.json"
    if not file.exists():
        answers = np.array(records["completion"].to_pylist(), object)
        seen = draw(records, HEAD_LABELS, 0)
        embeddings, inputs = embed(records), np.array(records["input_id"].to_pylist())
        labels = sorted(set(answers))
        fitted = fit_linear_head(embeddings[seen], answers[seen].tolist(), labels, inputs[seen].tolist())
        assert fitted is not None, "there are enough messages"
        rest = np.setdiff1d(np.arange(len(answers)), seen)
        predicted = np.array(fitted.head.labels, object)[fitted.head.probabilities(embeddings[rest]).argmax(axis=1)]
        table = pa.table({"expected": answers[rest].tolist(), "predicted": predicted.tolist()})
        confusions = confused_labels(table, labels, limit=count)
        rows = [[*pair, errors] for pair, errors in confusions.items()]
        write_atomically(file, json.dumps({"messages": len(rest), "pairs": rows}, indent=1).encode())
    return {(first, second): errors for first, second, errors in json.loads(file.read_text())["pairs"]}


def with_random_negatives(records: pa.Table, labels: Sequence[str], seed: int) -> pa.Table:
    """Returns the records as pairs, each label against another one that is drawn at random."""
    generator = np.random.default_rng([seed, 1])
    answers = records["completion"].to_pylist()
    rejected = [str(generator.choice([label for label in labels if label != answer])) for answer in answers]
    column = records.schema.get_field_index("rejected")
    return assign_ids(records.set_column(column, "rejected", pa.array(rejected)))


def precision_for(folder: Path) -> str:
    """Returns the faster precision of this machine, the same for all arms and after an interruption."""
    file = folder / "precision.json"
    if not file.exists():
        write_atomically(file, json.dumps(choose_precision()).encode())
    return str(json.loads(file.read_text()))


def measure(folder: Path, task: TaskConfig, precision: str, test: pa.Table, confusions: Confusions) -> dict[str, float]:
    """Returns accuracy and share of confused answers on the test messages."""
    lm = load_language_model(folder, task, precision)
    predictions = run_suite(lm, test, SuiteConfig(), "test", full=True).predictions
    pairs = zip(predictions["expected"].to_pylist(), predictions["predicted"].to_pylist(), strict=True)
    confused = [tuple(sorted(map(str, pair))) in confusions for pair in pairs]
    return {"accuracy": float(predictions["score"].to_numpy().mean()), "confused": float(np.mean(confused))}


def interval(values: Sequence[float], signed: bool = False) -> str:
    """Formats a mean over seeds with its interval at 95%."""
    from scipy.stats import t

    text = f"{np.mean(values):+.1%}" if signed else f"{np.mean(values):.1%}"
    if len(values) < 2:
        return text
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{text} ± {half:.1%}"


def main() -> None:
    """Run all seeds and arms, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of banking77_train.csv and banking77_test.csv")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of intents")
    parser.add_argument("--per-intent", type=int, default=15, help="training messages of each intent")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--beta", type=float, default=0.1, help="weight of ORPO's odds ratio")
    parser.add_argument("--test", type=int, default=None, help="test messages of each intent; all by default")
    parser.add_argument("--arms", default="sft,random,hard")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    training, test = (concat(list(read(options.data / f"banking77_{name}.csv", COLUMNS))) for name in ("train", "test"))
    confusions = most_confused(training, options.folder, options.pairs)
    labels = sorted({name for pair in confusions for name in pair})
    training, test = (
        table.filter(pa.compute.is_in(table["completion"], value_set=pa.array(labels))) for table in (training, test)
    )
    if options.test is not None:
        test = test.take(pa.array(draw(test, options.test, 0)))
    precision = precision_for(options.folder)
    task = TaskConfig(system=SYSTEM, labels=labels)
    arms: dict[str, Callable[[pa.Table, int], pa.Table]] = {
        "sft": lambda records, seed: records,
        "random": lambda records, seed: with_random_negatives(records, labels, seed),
        "hard": lambda records, seed: pair_records(records, embed(records), labels, confusions),
    }
    if unknown := set(options.arms.split(",")) - arms.keys():
        parser.error(f"no arm {', '.join(sorted(unknown))}; there are {', '.join(arms)}")
    settings: dict[str, Any] = {
        "task": {"system": SYSTEM, "labels": labels},
        "train": {
            "epochs": options.epochs,
            # Fixed, as measuring takes about as long as an epoch here.
            "micro_batch_tokens": 2048,
            "precision": precision,
            "learning_rate": options.learning_rate,
        },
    }
    print(f"{len(labels)} intents: " + "; ".join(f"{a} / {b} ({n})" for (a, b), n in confusions.items()))
    print(f"{test.num_rows} test messages\n")
    print("| seed | arm | labels | steps | accuracy | confused |\n| ---: | --- | ---: | ---: | ---: | ---: |")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in options.arms.split(",")}
    for seed in range(options.seeds):
        records = training.take(pa.array(draw(training, options.per_intent, 100 + seed)))
        for name, measured in results.items():
            out = options.folder / f"seed-{seed}" / name
            out.parent.mkdir(parents=True, exist_ok=True)
            file = out.with_suffix(".json")
            if not file.exists():
                data = out.with_suffix(".parquet")
                if not data.exists():
                    export_file(arms[name](records, seed), data)
                orpo = {"name": "orpo", "beta": options.beta, "likelihood": "completion"}
                section = {**settings["train"], "objective": "sft" if name == "sft" else orpo}
                result = train(options.model, data, out, settings={**settings, "train": section, "seed": seed})
                values = {**measure(out, task, precision, test, confusions), "steps": result.summary["steps"]}
                write_atomically(file, json.dumps(values).encode())
            measured.append(json.loads(file.read_text()))
            numbers = f"{records.num_rows} | {measured[-1]['steps']}"
            shares = f"{measured[-1]['accuracy']:.1%} | {measured[-1]['confused']:.1%}"
            print(f"| {seed} | {name} | {numbers} | {shares} |", flush=True)
    for name, measured in results.items():
        columns = [interval([each[key] for each in measured]) for key in ("accuracy", "confused")]
        print(f"| mean | {name} | | | {' | '.join(columns)} |")
    if "hard" in results:
        for name in (each for each in results if each != "hard"):
            pairs = list(zip(results["hard"], results[name], strict=True))
            columns = [interval([a[key] - b[key] for a, b in pairs], signed=True) for key in ("accuracy", "confused")]
            print(f"| difference | hard - {name} | | | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
