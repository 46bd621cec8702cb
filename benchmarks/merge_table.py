"""Measures single models and their merges on every task, in the layout of FusionBench's tables.

    python benchmarks/merge_table.py FOLDER --data DIR [--model smollm2-135m] [--records 200]

Three models are trained from one base, each on one task:

- ``intents``: the intent of a bank customer's message, one of 12 (Banking77); accuracy of the most probable label.
- ``sums``: the result of one calculation with two numbers, as the solutions of GSM8K have them; exact match of the
  generated answer. Calculations of the training file are not in the test set.
- ``harmless``: Anthropic's harmless pairs, trained with SimPO; the share of pairs whose chosen answer has the higher
  mean log-probability a token, which is SimPO's reward. There is one file: conversations with the same first message
  are on one side.

``unseen`` is measured, and nobody was trained on it: 12 other intents, so it shows what a model can do elsewhere.

A row is a model, a column the score on a task. ``average`` is that over the three trained tasks. ``kept`` is the mean
over them of score / the specialist's score, with its bootstrap interval over records; ``gained`` that of (score -
base's) / (specialist's - base's), which leaves out what the base could do, over tasks that training made better. The
same command resumes: a training from its checkpoints, and what is measured is kept.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from preferences import conversations

from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.evaluate.bootstrap import resampled_ratios
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.suite import run_suite
from posttrain.merge.api import merge
from posttrain.models.language_model import load_language_model
from posttrain.models.precision import ComputePrecision, choose_precision
from posttrain.models.sources import fetch_once, locate
from posttrain.models.task import TaskConfig
from posttrain.store.files import write_atomically
from posttrain.store.logs import quiet_libraries
from posttrain.train.api import train

TASKS = ("intents", "sums", "harmless")

INTENTS = {
    "activate_my_card": "activate card",
    "age_limit": "age limit",
    "apple_pay_or_google_pay": "mobile pay",
    "atm_support": "cash machine",
    "automatic_top_up": "automatic top-up",
    "card_arrival": "card arrival",
    "card_swallowed": "card swallowed",
    "change_pin": "change PIN",
    "exchange_rate": "exchange rate",
    "lost_or_stolen_card": "lost card",
    "request_refund": "refund",
    "terminate_account": "close account",
}

UNSEEN = {
    "beneficiary_not_allowed": "beneficiary refused",
    "cancel_transfer": "cancel transfer",
    "card_about_to_expire": "card expires",
    "compromised_card": "card misused",
    "country_support": "countries",
    "declined_transfer": "transfer declined",
    "edit_personal_details": "change details",
    "getting_virtual_card": "virtual card",
    "passcode_forgotten": "forgotten passcode",
    "pin_blocked": "PIN blocked",
    "receiving_money": "receive money",
    "verify_my_identity": "prove identity",
}

TASK_CONFIGS = {
    "intents": {"system": "Name the intent.", "labels": list(INTENTS.values())},
    "sums": {"system": "Calculate.", "max_new_tokens": 8},
    "harmless": {},
    "unseen": {"system": "Name the intent.", "labels": list(UNSEEN.values())},
}

SUITES = {"harmless": SuiteConfig(scorer="preference")}

TRAINING: dict[str, dict[str, Any]] = {
    "intents": {"objective": "sft", "epochs": 3, "learning_rate": 1e-4},
    "sums": {"objective": "sft", "epochs": 3, "learning_rate": 1e-4},
    "harmless": {"objective": "simpo", "epochs": 2, "learning_rate": 5e-5, "max_length": 192},
}

Scores = dict[str, list[float]]
"""The score of each test record by task."""

ALL = TASKS
PAIR = ("intents", "sums")

MERGES: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "linear": (ALL, "linear", {}),
    "task_arithmetic, scale 0.3": (ALL, "task_arithmetic", {"scale": 0.3}),
    "task_arithmetic, scale 0.5": (ALL, "task_arithmetic", {"scale": 0.5}),
    "task_arithmetic, scale 0.7": (ALL, "task_arithmetic", {"scale": 0.7}),
    "task_arithmetic, scale 1": (ALL, "task_arithmetic", {"scale": 1.0}),
    "ties, density 0.2": (ALL, "ties", {"density": 0.2}),
    "ties, density 0.5": (ALL, "ties", {"density": 0.5}),
    "dare_linear, density 0.5, scale 0.7": (ALL, "dare_linear", {"density": 0.5, "scale": 0.7}),
    "dare_ties, density 0.5, scale 0.7": (ALL, "dare_ties", {"density": 0.5, "scale": 0.7}),
    "della, density 0.5": (ALL, "della", {"density": 0.5}),
    "slerp, intents and sums": (PAIR, "slerp", {}),
    "resolve_conflicts, intents and sums": (PAIR, "resolve_conflicts", {}),
}
"""Name of the row: models, method, options."""

WITHOUT_BASE = {"linear", "slerp"}

ANSWERS = ("intents-train", "sums-train", "harmless-answers")

WITH_DATA: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "fisher": ("fisher", ANSWERS, ("--examples", "128")),
    "fisher, normalized": ("fisher", ANSWERS, ("--examples", "128", "--set", "normalize=true")),
    "regmean": ("regmean", ANSWERS, ("--examples", "128")),
    "by_importance": ("by_importance", ANSWERS, ("--examples", "128")),
}
"""Name of the row: method, training records that it reads, further options of the command."""

CALCULATION = re.compile(r"<<(\d{1,4}[-+*/]\d{1,4})=(\d{1,5})>>")


def intent_records(file: Path, names: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the messages of some intents in a fixed order that mixes the intents."""
    rows = concat(list(read(file, {"prompt": "text", "completion": "category"}))).to_pylist()
    return mixed(
        {"prompt": row["prompt"][-1]["content"], "completion": names[row["completion"]]}
        for row in rows
        if row["completion"] in names
    )


def calculations(file: Path) -> dict[str, str]:
    """Returns the results of the calculations in GSM8K's solutions, by the calculation."""
    answers = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    return {left: result for answer in answers for left, result in CALCULATION.findall(answer)}


def pair_records(file: Path, tokenizer: Any, longest: int) -> list[dict[str, Any]]:
    """Returns the preference pairs whose conversation has at most so many tokens with either answer."""
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt, chosen, rejected in conversations(str(file))
    ]
    size = {id(row): len(tokenizer(json.dumps(row, ensure_ascii=False))["input_ids"]) for row in rows}
    return mixed(row for row in rows if size[id(row)] <= longest)


def mixed(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows in the order of their hashes, which is the same wherever it is computed."""
    return sorted(rows, key=lambda row: hashlib.sha256(json.dumps(row).encode()).digest())


def on_test_side(row: dict[str, Any]) -> bool:
    """Returns whether a conversation is one of the third that is measured on, by its first message."""
    return hashlib.sha256(row["prompt"][0]["content"].encode()).digest()[0] % 3 == 0


def merge_with_data(name: str, models: Sequence[Path], data: Path, out: Path) -> None:
    """Merges by a method that reads training records, as a user does."""
    method, files, options = WITH_DATA[name]
    command = [sys.executable, "-m", "posttrain", "merge", *map(str, models), "--method", method, "--out", str(out)]
    for file in files:
        command += ["--data", str(data / f"{file}.jsonl")]
    subprocess.run([*command, *options], check=True, stdout=sys.stderr)


def write_data(folder: Path, data: Path, base: Path, options: argparse.Namespace) -> None:
    """Writes training and test records of each task."""
    from posttrain.models.loading import load_tokenizer

    test_sums, train_sums = (calculations(data / f"gsm8k_{name}.jsonl") for name in ("test", "train"))
    pairs = pair_records(data / "hh_harmless_test.jsonl.gz", load_tokenizer(str(base)), 256)
    test, training = data / "banking77_test.csv", data / "banking77_train.csv"
    sets = {
        "intents-train": intent_records(training, INTENTS)[: options.intents],
        "intents-test": intent_records(test, INTENTS)[: options.records],
        "unseen-test": intent_records(test, UNSEEN)[: options.records],
        "sums-train": mixed({"prompt": left, "completion": result} for left, result in train_sums.items())[
            : options.sums
        ],
        "sums-test": mixed(
            {"prompt": left, "completion": result} for left, result in test_sums.items() if left not in train_sums
        )[: options.records],
        "harmless-train": [row for row in pairs if not on_test_side(row)][: options.pairs],
        "harmless-test": [row for row in pairs if on_test_side(row)][: options.records],
    }
    # For methods that read answers.
    sets["harmless-answers"] = [
        {"prompt": row["prompt"], "completion": row["chosen"]} for row in sets["harmless-train"]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(folder / f"{name}.jsonl", text.encode())
    # Last, and so the mark that all are there.
    write_atomically(folder / "counts.json", json.dumps({name: len(rows) for name, rows in sets.items()}).encode())


def measure(model: Path, data: Path, file: Path, precision: ComputePrecision) -> Scores:
    """Returns the score of each test record by task; keeps them in the file."""
    scores: Scores = json.loads(file.read_text()) if file.exists() else {}
    missing = [name for name in TASK_CONFIGS if name not in scores]
    if missing:
        lm = load_language_model(model, TaskConfig(), precision)
        for name in missing:
            lm.task = TaskConfig.read(TASK_CONFIGS[name], name)
            records = concat(list(read(data / f"{name}-test.jsonl")))
            result = run_suite(lm, records, SUITES.get(name, SuiteConfig()), name)
            scores[name] = result.predictions["score"].to_pylist()
            write_atomically(file, json.dumps(scores).encode())
    return scores


def row(name: str, scores: Scores, single: dict[str, Scores]) -> str:
    """Formats a row of the table; ``single`` has the scores of the base and of the specialists."""
    means = {task: float(np.mean(values)) for task, values in scores.items()}
    kept, gained = [], []
    for number, task in enumerate(TASKS):
        own, base = (float(np.mean(single[model][task])) for model in (task, "base"))
        if own > 0:
            pair = np.array(scores[task]), np.array(single[task][task])
            kept.append((means[task] / own, resampled_ratios(*pair, seed=number)))
        if own > base:
            gained.append((means[task] - base) / (own - base))
    cells = [f"{means[task]:.1%}" for task in TASKS] + [f"{np.mean([means[task] for task in TASKS]):.1%}"]
    low, high = np.quantile(np.mean([ratios for _, ratios in kept], axis=0), [0.025, 0.975])
    cells.append(f"{np.mean([ratio for ratio, _ in kept]):.1%} [{low:.1%}, {high:.1%}]")
    cells += [f"{np.mean(gained):.1%}" if gained else "", f"{means['unseen']:.1%}"]
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Trains, merges and measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data files")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--records", type=int, default=200, help="test records a task")
    parser.add_argument("--intents", type=int, default=600, help="training messages")
    parser.add_argument("--sums", type=int, default=1600, help="training calculations")
    parser.add_argument("--pairs", type=int, default=320, help="training pairs")
    parser.add_argument("--merges", default=None, help="names of rows, separated by ;, of the methods; all by default")
    parser.add_argument("--keep", action="store_true", help="keep the merged models' folders")
    options = parser.parse_args()
    quiet_libraries()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    every = [*MERGES, *WITH_DATA]
    names = options.merges.split(";") if options.merges else every
    if unknown := set(names) - set(every):
        parser.error(f"no merge {', '.join(sorted(unknown))}; there are {'; '.join(every)}")
    base = fetch_once(locate(options.model, Path()), folder / "base")
    data = folder / "data"
    if not (data / "counts.json").exists():
        write_data(data, options.data, base, options)
    print(f"records: {(data / 'counts.json').read_text()}\n", flush=True)
    file = folder / "precision.json"
    if not file.exists():
        write_atomically(file, json.dumps(choose_precision()).encode())
    precision = json.loads(file.read_text())
    models, results = {"base": base}, folder / "scores"
    results.mkdir(exist_ok=True)
    for task in TASKS:
        models[task] = folder / task
        if (models[task] / "summary.json").exists():
            continue  # whatever has changed in the code since
        settings = {
            "task": {key: value for key, value in TASK_CONFIGS[task].items() if key != "max_new_tokens"},
            # Fixed, as measuring takes about as long as a part of an epoch here.
            "train": {"micro_batch_tokens": 2048, "precision": precision, **TRAINING[task]},
        }
        result = train(base, data / f"{task}-train.jsonl", models[task], settings=settings)
        print(f"{task}: {result.steps} steps, last loss {result.summary['last_loss']:.3f}", flush=True)
    header = [*TASKS, "average", "kept", "gained", "unseen"]
    print(f"\n| model | {' | '.join(header)} |\n| --- |" + " ---: |" * len(header), flush=True)
    single = {name: measure(model, data, results / f"{name}.json", precision) for name, model in models.items()}
    for name in models:
        print(row(name, single[name], single), flush=True)
    for name in names:
        slug = re.sub(r"\W+", "-", name)
        out, file = folder / "merged" / slug, results / f"{slug}.json"
        if not file.exists() or json.loads(file.read_text()).keys() != TASK_CONFIGS.keys():
            if not out.exists() and name in MERGES:
                members, method, values = MERGES[name]
                root = None if method in WITHOUT_BASE else base
                merge([models[task] for task in members], out, method=method, base=root, **values)
            elif not out.exists():
                merge_with_data(name, [models[task] for task in TASKS], data, out)
            measure(out, data, file, precision)
            if not options.keep:
                shutil.rmtree(out)
        print(row(name, json.loads(file.read_text()), single), flush=True)


if __name__ == "__main__":
    main()
