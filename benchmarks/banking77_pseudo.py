"""Measures what pseudo-labels of a linear head bring on Banking77, and what the head reaches alone.

    python benchmarks/banking77_pseudo.py WORKSPACE FOLDER --data DIR [--seeds 3] [--per-label 8] [--epochs 2]

``WORKSPACE`` is ``examples/banking77``: three rounds of 150 chosen labels, full fine-tuning of SmolLM2-135M. For each
seed the benchmark runs a copy in ``FOLDER`` up to the labels of the last round, with the user's command, and ends two
copies of that: ``plain`` as the example is, and ``pseudo`` with `PSEUDO`. So both arms have the same labels of people.
``accuracy`` is the champion's on all test messages, with its exact interval; ``head`` is a linear head on MiniLM's
embeddings with the same labels, on the same messages; ``seconds`` those of all rounds. The rows ``mean`` have the
interval over seeds, by Student's t. The same command resumes an interrupted run. Nothing else should run beside it: the
times are compared.
"""

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from posttrain.loop.config import load_config
from posttrain.loop.context import RoundContext
from posttrain.loop.history import finished_states
from posttrain.loop.linear_head import fit_head
from posttrain.loop.scoring import sentence_embeddings
from posttrain.models.binomial import clopper_pearson
from posttrain.models.linear_head import LinearHead
from posttrain.store.workspace import Workspace

PSEUDO = {"teacher": "linear", "confidence": 0.5, "weight": 1.0}
"""The teacher's answers count as people's: of those it gives at 0.5 or more, nine in ten are right."""


@dataclass(frozen=True)
class Result:
    """Accuracies on all test messages, and the seconds of all rounds."""

    accuracy: float
    head: float
    messages: int
    labels: int
    pseudo: int
    seconds: float


def label(example: Path, root: Path, data: Path, seed: int) -> None:
    """Copies the example into ``root``, unless it is there, and runs it until all labels are given."""
    if not (root / "posttrain.yaml").exists():
        shutil.copytree(example, root, ignore=shutil.ignore_patterns(".posttrain"))
        config = read(root)
        for section, names in {"data": ("pool", "test"), "label": ("file",)}.items():
            for name in names:
                config[section][name] = str(data.absolute() / Path(config[section][name]).name)
        # Each arm scores its champion on all test messages, after its last round.
        config["evaluate"]["final"] = False
        write(root, {**config, "seed": 17 + seed})
    run(root, "--rounds", str(load_config(root).rounds - 1))
    run(root, "--until", "label")


def continue_in(root: Path, labelled: Path, pseudo: dict[str, object] | None, epochs: int) -> None:
    """Copies a workspace with all labels into ``root``, unless it is there, and sets pseudo-labels."""
    if (root / "posttrain.yaml").exists():
        return
    copy = root.with_name(f"{root.name}.copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(labelled, copy)
    config = read(copy)
    del config["evaluate"]["final"]
    if pseudo is not None:
        config["label"]["pseudo"] = pseudo
        config["train"]["epochs"] = epochs
    write(copy, config)
    copy.rename(root)


def read(root: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((root / "posttrain.yaml").read_text(encoding="utf-8")))


def write(root: Path, config: dict[str, Any]) -> None:
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def run(root: Path, *options: str) -> None:
    subprocess.run([sys.executable, "-m", "posttrain", "run", "-w", str(root), *options], check=True)


def measure(root: Path) -> Result:
    """Runs the loop to its end with the user's command, and reads what it reached."""
    run(root)
    config = load_config(root)
    with Workspace.create(root, config.store) as workspace:
        states = finished_states(workspace)
        last, champion = states[-1], workspace.metadata.deployments()[-1].model_id
        final = last.final_of(champion)
        assert final is not None, "the champion was measured on all test messages"
        context = RoundContext(workspace, config, len(states) - 1, in_round=False, state=last)
        id = fit_head(context, last.id("dataset"))
        head, test = LinearHead.load(context.path(str(id))), context.dataset(last.id("test")).records
        embeddings = sentence_embeddings(context, str(config.label.embedder), test)
        predicted = np.array(head.labels)[head.probabilities(embeddings).argmax(axis=1)]
        pseudo = workspace.metadata.artifact(last.outputs.get("pseudo", ""))
        return Result(
            accuracy=float(final["metrics"]["accuracy"]),
            head=float((predicted == np.array(test["completion"].to_pylist())).mean()),
            messages=test.num_rows,
            labels=last.labels or 0,
            pseudo=pseudo.meta["pseudo"]["records"] if pseudo else 0,
            seconds=sum(row.seconds or 0.0 for row in workspace.metadata.rounds()),
        )


def main() -> None:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="passes with pseudo-labels; without, the example's")
    options = parser.parse_args()
    results: dict[str, list[Result]] = {"plain": [], "pseudo": []}
    print("| seed | arm | labels | pseudo-labels | accuracy | head alone | seconds |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for seed in range(options.seeds):
        labelled = options.folder / f"seed-{seed}" / "labelled"
        labelled.parent.mkdir(parents=True, exist_ok=True)
        label(options.workspace, labelled, options.data, seed)
        for arm, settings in (("plain", None), ("pseudo", PSEUDO)):
            root = options.folder / f"seed-{seed}" / arm
            continue_in(root, labelled, settings, options.epochs)
            result = measure(root)
            results[arm].append(result)
            accuracy, head = (share(value, result.messages) for value in (result.accuracy, result.head))
            counts = f"{result.labels} | {result.pseudo}"
            print(f"| {seed} | {arm} | {counts} | {accuracy} | {head} | {result.seconds:.0f} |", flush=True)
    for arm, runs in results.items():
        accuracy, head = mean([run.accuracy for run in runs]), mean([run.head for run in runs])
        print(f"| mean | {arm} | | | {accuracy} | {head} | {np.mean([run.seconds for run in runs]):.0f} |")
    ratios = [b.seconds / a.seconds for a, b in zip(results["plain"], results["pseudo"], strict=True)]
    print(f"time with pseudo-labels: {np.mean(ratios):.2f} times that without")


def share(value: float, count: int) -> str:
    """Formats a share of ``count`` messages with its exact interval."""
    low, high = clopper_pearson(round(value * count), count)
    return f"{value:.1%} ({low:.1%} to {high:.1%})"


def mean(values: list[float]) -> str:
    """Formats a mean over seeds with its interval at 95%."""
    from scipy.stats import t

    if len(values) < 2:
        return f"{np.mean(values):.1%}"
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.1%} ± {half:.1%}"


if __name__ == "__main__":
    main()
