"""How many labels does the loop need with LoRA on a language model? Chosen against drawn at random, on the same seeds.

    python benchmarks/label_efficiency_model.py WORKSPACE FOLDER --data DIR [--seeds 3] [--rounds 3]

``WORKSPACE`` is an example's folder, such as ``examples/banking77``. For each seed a copy of it is made in ``FOLDER``,
whose data paths lead to ``DIR``, with `SETTINGS` in place of the example's own, and ``posttrain run --baseline random``
turns both loops: the same base model, data, training, gate and number of labels. A run that is cut off goes on with the
same command. ``area`` is the mean accuracy under the curve, ``p`` that of the paired difference over seeds by a
sign-flip test, and ``labels`` how many reach what random reached in the end.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import yaml

from posttrain.inspect.random_baseline import Comparison, run_baseline
from posttrain.loop.config import load_config
from posttrain.loop.loop import Loop
from posttrain.select.strategy_comparison import area_under_curve, labels_to_target, sign_flip_test
from posttrain.store.workspace import Workspace

SETTINGS = {
    "train": {"method": "lora", "epochs": 6, "learning_rate": 2.0e-3, "batch_size": 16},
    "gate": {"deploy": ["accuracy >= champion.accuracy"]},
}
"""LoRA, and a gate that no timing decides."""


def workspace_of(example: Path, folder: Path, data: Path, seed: int) -> Path:
    """A copy of an example with a seed of its own."""
    root = folder / f"seed-{seed}"
    if not (root / "posttrain.yaml").exists():
        shutil.copytree(example, root, ignore=shutil.ignore_patterns(".posttrain"))
        config = yaml.safe_load((root / "posttrain.yaml").read_text(encoding="utf-8"))
        for section, names in {"data": ("pool", "test"), "label": ("file",)}.items():
            for name in names:
                config[section][name] = str(data.absolute() / Path(config[section][name]).name)
        config |= {"seed": seed, **SETTINGS}
        config["evaluate"] |= {"final": False, "latency": {"prompts": 0}}  # of what no curve shows anything
        (root / "posttrain.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return root


def compared(root: Path, rounds: int | None) -> Comparison:
    config = load_config(root)
    with Workspace.create(root, config.store) as workspace:
        Loop(workspace, config).run(rounds)
        found = run_baseline(workspace, config)
    assert found is not None
    return found


def main() -> None:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workspace", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    found = []
    for seed in range(arguments.seeds):
        root = workspace_of(arguments.workspace, arguments.folder, arguments.data, seed)
        found.append(compared(root, arguments.rounds))
        print(f"seed {seed}: {found[-1].conclusion}", flush=True)
    counts = [one.labels for one in found[0].ours]
    sides = {"chosen": [one.ours for one in found], "at random": [one.random for one in found]}
    curves = {name: np.array([[at.value for at in curve] for curve in side]) for name, side in sides.items()}
    areas = {name: area_under_curve(counts, values) for name, values in curves.items()}
    p = sign_flip_test(areas["chosen"] - areas["at random"])
    needed = [
        labels_to_target(counts, ours, drawn[-1])
        for ours, drawn in zip(curves["chosen"], curves["at random"], strict=True)
    ]
    print("\n| labels | " + " | ".join(map(str, counts)) + " | area |")
    print("| --- |" + " ---: |" * (len(counts) + 1))
    for name, values in curves.items():
        print(
            f"| {name} | " + " | ".join(f"{one:.3f}" for one in values.mean(axis=0)) + f" | {areas[name].mean():.3f} |"
        )
    print(f"\np = {p:.3f} over {len(found)} seeds; labels to what random reaches: {needed}")


if __name__ == "__main__":
    main()
