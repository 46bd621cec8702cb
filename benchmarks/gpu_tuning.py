"""Compares studies whose trainings share a GPU, packed by their measured memory, with one training at a time.

    python benchmarks/gpu_tuning.py FOLDER --data DIR [--model smollm2-135m] [--trials 16] [--workers 1 4 16]
        [--occupied 0 70]

SmolLM2-135M with LoRA learns the intents of Banking77's messages; every row is ``posttrain tune`` with the same
trainings, and ``--workers`` of them at a time at most. ``--occupied`` is the share of the GPU's memory, in percent,
that another program has. Printed are the seconds; the trainings that ran at a time on average, which is the sum of
their seconds by the study's; the most memory of the GPU that ``nvidia-smi`` showed beside that program's; the most
that a training was measured to take; and the best held-out loss, which is to be the same in all rows.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from banking77_messages import answer, draw_intents, draw_messages, write_records

HELD_OUT = 6  # messages of each intent

_OCCUPY = """
import sys, time, torch
free, total = torch.cuda.mem_get_info()
block = torch.empty(int(total * float(sys.argv[1]) / 100), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
time.sleep(3600)
"""


def used_memory() -> int:
    """Returns the bytes in use on the first GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) << 20


@contextmanager
def occupied(percent: float) -> Iterator[None]:
    """Has another program take a share of the GPU's memory."""
    if not percent:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", _OCCUPY, str(percent)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


@contextmanager
def peak_of_gpu() -> Iterator[list[int]]:
    """Gives a list whose item is the most memory in use beyond that at the start, in bytes, once the context ends."""
    before, peak, end = used_memory(), [0], threading.Event()

    def look() -> None:
        while not end.wait(0.3):
            peak[0] = max(peak[0], used_memory() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        end.set()
        thread.join()


def run_study(folder: Path, config: dict[str, Any], workers: int) -> dict[str, Any]:
    """Runs a study in a folder of its own; returns its row."""
    folder.mkdir(parents=True)
    path = folder / "tune.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    command = [sys.executable, "-m", "posttrain", "tune", str(path), "--out", str(folder / "study")]
    start = time.perf_counter()
    with peak_of_gpu() as peak:
        subprocess.run([*command, "--engine", "processes", "--workers", str(workers)], check=True)
    seconds = time.perf_counter() - start
    trials = [json.loads(line) for line in (folder / "study" / "trials.jsonl").read_text().splitlines()]
    return {
        "seconds": seconds,
        "at a time": sum(trial["seconds"] for trial in trials) / seconds,
        "finished": sum(trial["state"] == "finished" for trial in trials),
        "GPU, GB": peak[0] / 1e9,
        "a training, GB": max(trial["gpu_memory_bytes"] for trial in trials) / 1e9,
        "best loss": min(trial["value"] for trial in trials if trial["value"] is not None),
    }


def main() -> None:
    """Runs all studies, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of banking77_train.csv and banking77_test.csv")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--occupied", type=float, nargs="+", default=[0.0])
    parser.add_argument("--intents", type=int, default=10)
    parser.add_argument("--per-intent", type=int, default=16, help="training messages of each intent")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    intents = draw_intents(options.data, options.intents)
    train = draw_messages(options.data, intents, "train")
    end = HELD_OUT + options.per_intent
    options.folder.mkdir(parents=True, exist_ok=True)
    held_out, records = (options.folder.absolute() / name for name in ("held_out.jsonl", "train.jsonl"))
    write_records(held_out, [row for rows in train.values() for row in rows[:HELD_OUT]])
    write_records(records, [row for rows in train.values() for row in rows[HELD_OUT:end]])
    config = {
        "model": options.model,
        "data": str(records),
        "task": {"labels": [answer(intent) for intent in intents]},
        "train": {"method": "lora", "batch_size": 8, "epochs": options.epochs},
        "tune": {
            "space": {"train.learning_rate": {"float": [3e-5, 3e-3], "log": True}},
            "held_out": str(held_out),
            "sampler": "quasi_random",
            "budget": f"{options.trials} trials",
        },
    }
    print("| workers | used by others | seconds | at a time | finished | GPU, GB | a training, GB | best loss |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for percent in options.occupied:
        with occupied(percent):
            for workers in options.workers:
                row = run_study(options.folder / f"{workers}-{percent:g}", config, workers)
                cells = [f"{row[name]:.1f}" for name in ("seconds", "at a time")]
                cells += [str(row["finished"]), f"{row['GPU, GB']:.2f}", f"{row['a training, GB']:.2f}"]
                print(f"| {workers} | {percent:g}% | {' | '.join(cells)} | {row['best loss']:.4f} |", flush=True)


if __name__ == "__main__":
    main()
