"""Compares populations, which change settings while models train, with fixed schedules from the same compute.

    python benchmarks/population_schedules.py FOLDER --data DIR [--model smollm2-135m] [--seeds 3] [--trials 8]
        [--parts 6] [--intents 10] [--per-intent 16] [--epochs 3] [--arms fixed constant pbt pbt_cosine]
        [--engine inline]

SmolLM2-135M with LoRA learns the intents of Banking77's messages. Each arm is ``posttrain tune`` with as many whole
trainings over the same space: ``fixed`` draws settings at random, and the learning rate falls as a cosine; ``constant``
draws them at random and holds them; ``pbt`` begins with a constant rate, and after each part of a training
the poorest quarter continues from the best quarter's checkpoints with other settings; in ``pbt_cosine`` the rate falls
as a cosine, too, and populations change its peak. An arm's model with the least
held-out loss is measured on test messages: loss in nats a message, and accuracy. A row has the means over seeds, with
intervals by Student's t. The same command resumes.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from banking77_messages import answer, draw_intents, draw_messages, write_records
from hard_negatives import interval, precision_for

from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.suite import run_suite
from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig
from posttrain.store.files import write_atomically

HELD_OUT = 6  # messages of each intent

SPACE: dict[str, Any] = {
    "train.learning_rate": {"float": [3e-5, 1e-2], "log": True},
    "train.optimizer.weight_decay": {"float": [1e-4, 0.1], "log": True},
    "train.lora.dropout": {"float": [0.0, 0.3]},
}

ARMS = ("fixed", "constant", "pbt", "pbt_cosine")

POPULATIONS = ("pbt", "pbt_cosine")


def config_of_arm(options: argparse.Namespace, arm: str, seed: int, precision: str) -> dict[str, Any]:
    """Returns the config of an arm's study."""
    schedule = {"name": "cosine", "warmup": 0.05} if arm in ("fixed", "pbt_cosine") else {"name": "constant"}
    scheduler = {"name": "none", "max_resource": options.parts}
    if arm in POPULATIONS:
        scheduler = {
            "name": "pbt",
            "population": options.trials,
            "interval": 1,
            "max_resource": options.parts,
        }
    # Those that continue from a checkpoint count as trials, too; the compute is that of `options.trials` trainings.
    forks = (options.parts - 1) * (options.trials // 4) if arm in POPULATIONS else 0
    tune = {
        "space": SPACE,
        "held_out": "../held_out.jsonl",
        "scheduler": scheduler,
        "budget": f"{options.trials + forks} trials",
    }
    if arm not in POPULATIONS:
        tune["sampler"] = "random"
    return {
        "seed": seed,
        "model": options.model,
        "data": "../train.jsonl",
        "task": {"labels": [answer(intent) for intent in draw_intents(options.data, options.intents)]},
        "train": {
            "method": "lora",
            "epochs": options.epochs,
            "batch_size": 8,
            "precision": precision,
            "schedule": schedule,
        },
        "tune": tune,
    }


def measure(model: Path, config: dict[str, Any], test: Path) -> dict[str, float]:
    """Returns a model's loss and accuracy on the test messages."""
    lm = load_language_model(model, TaskConfig(**config["task"]), config["train"]["precision"])
    result = run_suite(lm, concat(list(read(test))), SuiteConfig(), "test")
    loss = -result.counts["log_likelihood_sum"] / result.counts["records"]
    return {"loss": loss, "accuracy": result.metrics["accuracy"]}


def run_arm(options: argparse.Namespace, folder: Path, arm: str, seed: int, precision: str) -> dict[str, float]:
    """Runs a study and measures its best model, unless both are done."""
    file = folder / f"{arm}.json"
    if not file.exists():
        config = config_of_arm(options, arm, seed, precision)
        (folder / arm).mkdir(parents=True, exist_ok=True)
        path, out = folder / arm / "tune.yaml", folder / arm / "study"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        command = [sys.executable, "-m", "posttrain", "tune", str(path), "--out", str(out)]
        subprocess.run([*command, "--engine", options.engine], check=True)
        trials = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
        finished = [trial for trial in trials if trial["state"] == "finished"]
        best = min(finished, key=lambda trial: trial["value"])
        values = measure(out / "trials" / f"{best['number']:04d}" / "model", config, folder / "test.jsonl")
        tokens = sum(trial["tokens"] for trial in trials)
        row = {"held-out loss": best["value"], **values, "tokens": tokens, "trials": len(trials)}
        write_atomically(file, json.dumps(row).encode())
        shutil.rmtree(out / "trials")
    return dict(json.loads(file.read_text()))


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """Formats the mean difference of pairs, with its interval."""
    pairs = np.subtract(values, others)
    half = math.nan
    if len(pairs) > 1:
        from scipy.stats import t

        half = t.ppf(0.975, len(pairs) - 1) * pairs.std(ddof=1) / math.sqrt(len(pairs))
    return f"{pairs.mean():+.3f} ± {half:.3f}"


def main() -> None:
    """Runs all seeds and arms, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of banking77_train.csv and banking77_test.csv")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--parts", type=int, default=6)
    parser.add_argument("--intents", type=int, default=10)
    parser.add_argument("--per-intent", type=int, default=16, help="training messages of each intent")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--test", type=int, default=20, help="test messages of each intent")
    parser.add_argument("--engine", default="inline", help="processes, to run several trainings at a time")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    precision = precision_for(options.folder)
    intents = draw_intents(options.data, options.intents)
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    for seed in range(options.seeds):
        folder = options.folder / f"seed-{seed}"
        train, test = (draw_messages(options.data, intents, name) for name in ("train", "test"))
        # Each seed has messages of its own.
        start = seed * (HELD_OUT + options.per_intent)
        middle, end = start + HELD_OUT, start + HELD_OUT + options.per_intent
        write_records(folder / "held_out.jsonl", [row for rows in train.values() for row in rows[start:middle]])
        write_records(folder / "train.jsonl", [row for rows in train.values() for row in rows[middle:end]])
        write_records(folder / "test.jsonl", [row for rows in test.values() for row in rows[: options.test]])
        for arm, results in rows.items():
            results.append(run_arm(options, folder, arm, seed, precision))
            print(f"seed {seed} {arm}: {results[-1]}", flush=True)
    print("\n| arm | held-out loss | test loss | test loss less that of `fixed` | test accuracy | tokens |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for arm, results in rows.items():
        held_out, loss, accuracy = ([row[name] for row in results] for name in ("held-out loss", "loss", "accuracy"))
        against = difference(loss, [row["loss"] for row in rows["fixed"]]) if "fixed" in rows else ""
        tokens = np.mean([row["tokens"] for row in results])
        cells = [arm, f"{np.mean(held_out):.3f}", f"{np.mean(loss):.3f}", against, interval(accuracy), f"{tokens:,.0f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
