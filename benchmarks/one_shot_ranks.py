"""Compares the values of a supernet's sub-networks with those of the same adapters trained alone.

    python benchmarks/one_shot_ranks.py FOLDER --data DIR [--model smollm2-135m] [--alone 8] [--intents 10]
        [--per-intent 16] [--epochs 3]

SmolLM2-135M with LoRA learns the intents of Banking77's messages; the space gives each third of the layers a rank of
0, 4 or 16. ``posttrain tune`` with ``one_shot`` trains one supernet and measures all 27 sub-networks on held-out
messages; a second study trains ``--alone`` of them, drawn at random, and the one that the first study has chosen.
Printed are Kendall's tau between both values, the loss of the chosen one trained alone beside the others', the test
loss and accuracy of the exported sub-network and of the best adapter trained alone.
The same command resumes.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from banking77_messages import answer, draw_intents, draw_messages, write_records
from hard_negatives import precision_for
from population_schedules import measure
from scipy.stats import kendalltau

HELD_OUT = 6  # messages of each intent

RANKS = [0, 4, 16]


def patterns(layers: int) -> list[str]:
    """Returns the patterns of the first, the middle and the last third of the layers."""
    numbers = [list(map(str, range(part * layers // 3, (part + 1) * layers // 3))) for part in range(3)]
    return [f"layers.({'|'.join(third)})\\..*" for third in numbers]


def run_study(folder: Path, config: dict[str, Any], **tune: Any) -> list[dict[str, Any]]:
    """Runs a study, and returns its trials."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tune.yaml"
    path.write_text(yaml.safe_dump({**config, "tune": {"held_out": "../held_out.jsonl", **tune}}, sort_keys=False))
    command = [sys.executable, "-m", "posttrain", "tune", str(path), "--out", str(folder / "study")]
    subprocess.run(command, check=True)
    return [json.loads(line) for line in (folder / "study" / "trials.jsonl").read_text().splitlines()]


def main() -> None:
    """Runs both studies, and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of banking77_train.csv and banking77_test.csv")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--alone", type=int, default=8)
    parser.add_argument("--intents", type=int, default=10)
    parser.add_argument("--per-intent", type=int, default=16, help="training messages of each intent")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--test", type=int, default=20, help="test messages of each intent")
    options = parser.parse_args()
    folder = options.folder
    intents = draw_intents(options.data, options.intents)
    train, test = (draw_messages(options.data, intents, name) for name in ("train", "test"))
    end = HELD_OUT + options.per_intent
    write_records(folder / "held_out.jsonl", [row for rows in train.values() for row in rows[:HELD_OUT]])
    write_records(folder / "train.jsonl", [row for rows in train.values() for row in rows[HELD_OUT:end]])
    write_records(folder / "test.jsonl", [row for rows in test.values() for row in rows[: options.test]])
    lora = {"rank": max(RANKS), "alpha": 2 * max(RANKS)}
    config = {
        "model": options.model,
        "data": "../train.jsonl",
        "task": {"labels": [answer(intent) for intent in intents]},
        "train": {
            "method": "lora",
            "learning_rate": 1e-3,
            "batch_size": 8,
            "epochs": options.epochs,
            "lora": lora,
            "precision": precision_for(folder),
        },
    }
    space = {f"train.lora.ranks.{pattern}": RANKS for pattern in patterns(options.layers)}
    shared = run_study(folder / "one-shot", config, space=space, one_shot=True, sampler="grid", budget="27 trials")
    values = {json.dumps(trial["settings"], sort_keys=True): trial for trial in shared if trial["value"] is not None}
    chosen = min(values.values(), key=lambda trial: trial["value"])["settings"]
    others = [json.loads(key) for key in sorted(values) if json.loads(key) != chosen]
    points = [chosen, *random.Random(0).sample(others, options.alone)]
    tune = {"space": space, "initial": points, "sampler": "random", "budget": f"{len(points)} trials"}
    alone = run_study(folder / "alone", config, **tune)
    pairs = [(values[json.dumps(trial["settings"], sort_keys=True)]["value"], trial["value"]) for trial in alone]
    tau = kendalltau(*zip(*pairs, strict=True))
    for shared_value, value in pairs:
        print(f"in the supernet {shared_value:.4f}, alone {value:.4f}")
    print(f"Kendall's tau {tau.statistic:.2f} (p {tau.pvalue:.3f})")
    rank = sorted(value for _, value in pairs).index(pairs[0][1]) + 1
    print(f"the chosen one is number {rank} of {len(pairs)} trained alone")
    best = min(alone, key=lambda trial: trial["value"])["number"]
    for name, model in {
        "exported": folder / "one-shot" / "study" / "model",
        "best alone": folder / "alone" / "study" / "trials" / f"{best:04d}" / "model",
    }.items():
        print(name, measure(model, config, folder / "test.jsonl"))


if __name__ == "__main__":
    main()
