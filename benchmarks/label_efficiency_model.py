"""Compares the loop's accuracy with chosen and with random labels, with LoRA on a language model, on the same seeds.

    python benchmarks/label_efficiency_model.py WORKSPACE FOLDER --data DIR [--seeds 3] [--rounds 3]

``WORKSPACE`` is an example's folder, such as ``examples/banking77``. For each seed the benchmark copies it into
``FOLDER``, points the data paths to ``DIR``, replaces the example's settings with `SETTINGS`, and runs both loops as
``posttrain run --baseline random`` does: with the same base model, data, training, gate and number of labels. The same
command resumes an interrupted run. ``area`` is the mean accuracy under the curve, ``p`` the p-value of the paired
difference over seeds by a sign-flip test, and ``labels`` the number of chosen labels that reach the final accuracy of
random.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import yaml

from posttrain.inspect.random_baseline import Comparison, run_random_loop
from posttrain.loop.config import load_config
from posttrain.loop.loop import Loop
from posttrain.select.strategy_comparison import area_under_curve, labels_to_target, sign_flip_test
from posttrain.store.workspace import Workspace

SETTINGS = {
    "train": {"method": "lora", "epochs": 6, "learning_rate": 2.0e-3, "batch_size": 16},
    "gate": {"deploy": ["accuracy >= champion.accuracy"]},
}
"""LoRA, and a gate that does not depend on timings."""


def copy_workspace(example: Path, folder: Path, data: Path, seed: int) -> Path:
    """Copy the example with a seed of its own; return the copy's folder."""
    root = folder / f"seed-{seed}"
    if not (root / "posttrain.yaml").exists():
        shutil.copytree(example, root, ignore=shutil.ignore_patterns(".posttrain"))
        config = yaml.safe_load((root / "posttrain.yaml").read_text(encoding="utf-8"))
        for section, names in {"data": ("pool", "test"), "label": ("file",)}.items():
            for name in names:
                config[section][name] = str(data.absolute() / Path(config[section][name]).name)
        config |= {"seed": seed, **SETTINGS}
        config["evaluate"] |= {"final": False, "latency": {"prompts": 0}}  # the curves show neither
        (root / "posttrain.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return root


def compare(root: Path, rounds: int | None) -> Comparison:
    """Run the loop and its random baseline in the workspace."""
    config = load_config(root)
    with Workspace.create(root, config.store) as workspace:
        Loop(workspace, config).run(rounds)
        comparison = run_random_loop(workspace, config)
    assert comparison is not None
    return comparison


def main() -> None:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workspace", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    comparisons = []
    for seed in range(arguments.seeds):
        root = copy_workspace(arguments.workspace, arguments.folder, arguments.data, seed)
        comparisons.append(compare(root, arguments.rounds))
        print(f"seed {seed}: {comparisons[-1].conclusion}", flush=True)
    counts = [result.labels for result in comparisons[0].ours]
    loops = {
        "chosen": [comparison.ours for comparison in comparisons],
        "at random": [comparison.random for comparison in comparisons],
    }
    curves = {name: np.array([[result.value for result in run] for run in runs]) for name, runs in loops.items()}
    areas = {name: area_under_curve(counts, values) for name, values in curves.items()}
    p = sign_flip_test(areas["chosen"] - areas["at random"])
    labels = [
        labels_to_target(counts, ours, random[-1])
        for ours, random in zip(curves["chosen"], curves["at random"], strict=True)
    ]
    print("\n| labels | " + " | ".join(map(str, counts)) + " | area |")
    print("| --- |" + " ---: |" * (len(counts) + 1))
    for name, values in curves.items():
        print(
            f"| {name} | "
            + " | ".join(f"{mean:.3f}" for mean in values.mean(axis=0))
            + f" | {areas[name].mean():.3f} |"
        )
    print(f"\np = {p:.3f} over {len(comparisons)} seeds; chosen labels that reach random's final accuracy: {labels}")


if __name__ == "__main__":
    main()
