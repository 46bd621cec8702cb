"""Records learning curves of small trainings, for comparisons of searches on a simulated clock (`search_vs_peers.py`).

    OMP_NUM_THREADS=1 python benchmarks/record_curves.py FOLDER --data DIR [--write benchmarks/curves.csv]

Three tasks, as three rounds of a loop have them: 8, 12 and 16 intents of Banking77, with 15, 25 and 35 messages each,
and five more of each held out. A Llama of two layers and width 32, begun at random, learns to write the intent after
the message. ``posttrain tune`` trains with each of the 192 points of `SPACE`, in nine parts; the value after each is
the held-out loss in nats a token. Recorded are these, the seconds of a whole training and its tokens. A training that
diverges has ``nan`` from there on. The same command continues where it was stopped.
"""

import argparse
import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from banking77_messages import draw_intents, draw_messages, write_records

from posttrain.models.tiny import write_tiny_model

PARTS = 9

RATES = [round(1e-4 * 300 ** (step / 7), 8) for step in range(8)]

SPACE: dict[str, list[Any]] = {
    "train.learning_rate": RATES,
    "train.batch_size": [8, 16, 32],
    "train.optimizer.name": ["adamw", "muon"],
    "train.schedule.name": ["cosine", "constant"],
    "train.schedule.warmup": [0.0, 0.1],
}

TASKS = {
    # intents, messages of each, epochs
    "round 1": (8, 15, 8),
    "round 2": (12, 25, 4),
    "round 3": (16, 35, 3),
}

HELD_OUT = 5  # messages of each intent


def write_task(folder: Path, data: Path, task: str) -> Path:
    """Writes records and config of a task; returns the config's path."""
    intents, messages, epochs = TASKS[task]
    training, held_out = [], []
    names = draw_intents(data, intents, of=max(count for count, _, _ in TASKS.values()))
    for records in draw_messages(data, names).values():
        held_out += records[:HELD_OUT]
        training += records[HELD_OUT : HELD_OUT + messages]
    write_records(folder / "train.jsonl", training)
    write_records(folder / "held_out.jsonl", held_out)
    tune = {
        "space": SPACE,
        "held_out": "held_out.jsonl",
        "sampler": "grid",
        "scheduler": {"name": "none", "max_resource": PARTS},
        "budget": f"{math.prod(map(len, SPACE.values()))} trials",
    }
    train = {"epochs": epochs, "method": "full", "precision": "float32"}
    config = {"model": "../model", "data": "train.jsonl", "train": train, "tune": tune}
    (folder / "tune.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder / "tune.yaml"


def curves(study: Path, task: str) -> Iterator[dict[str, Any]]:
    """Yields a row of the table for each trial of a study."""
    for line in (study / "trials.jsonl").read_text().splitlines():
        trial = json.loads(line)
        values = [report[1] for report in trial["reports"]]
        values += [math.nan] * (PARTS - len(values))
        yield {
            "task": task,
            **trial["settings"],
            "seconds": f"{trial['seconds']:.2f}",
            "tokens": trial["tokens"],
            **{f"loss {part + 1}": f"{value:.5g}" for part, value in enumerate(values)},
        }


def main() -> None:
    """Runs the studies and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    write_tiny_model(options.folder / "model", width=32)
    rows: list[dict[str, Any]] = []
    for task in TASKS:
        folder = options.folder / task.replace(" ", "-")
        config = write_task(folder, options.data, task)
        command = [sys.executable, "-m", "posttrain", "tune", str(config), "--out", str(folder / "study")]
        subprocess.run(command, check=True)
        rows += curves(folder / "study", task)
    if options.write:
        with options.write.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
