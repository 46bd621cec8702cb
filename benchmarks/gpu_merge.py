"""Compares merging by a GPU with merging by the processor of the same machine: the bits and the time.

    python benchmarks/gpu_merge.py --dir DIR [--cores 16 4] [--repeats 3]

Every method that a GPU can run merges random tensors on both; the exit code is 1 if bits of a mean differ. DIR
gets the models of 1.1 billion weights of ``merge_vs_mergekit.py``. Each run is a process of its own, on as many cores
as ``--cores`` names; the table gives medians of the merge's seconds, without and with the program's start. RegMean
solves one layer of 4,096 inputs, of which three models have Gram matrices.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from merge_vs_mergekit import recipes, warm, write_models

from posttrain.merge import engine
from posttrain.merge.api import merge
from posttrain.merge.methods.registry import METHODS
from posttrain.testing.merge_methods import merge_tensors, random_models

# Of solutions of linear equations, which differ in rounding.
_TOLERANCE = 1e-5


def largest_differences() -> dict[str, float]:
    """Returns the largest difference between the GPU's and the processor's result, by method."""
    differences = {}
    for name, method in METHODS.items():
        if method.accelerated:
            models, base = random_models(method.models[1] or 3)
            by_processor, by_gpu = (
                merge_tensors(method, models, base, devices=devices) for devices in ([], [torch.device("cuda", 0)])
            )
            pairs = [(by_processor[key], by_gpu[key]) for key in by_processor if by_processor[key].numel()]
            differences[name] = max(float((left - right).abs().max()) for left, right in pairs)
    return differences


def solve_seconds(width: int = 4096) -> dict[str, float]:
    """Returns the seconds of RegMean on one linear layer, by device."""
    models, base = random_models(3, {"layer": (width, width)})
    rows = [torch.randn(2 * width, width, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    grams = [{"layer": sample.T @ sample} for sample in rows]
    seconds = {}
    for name, devices in (("processor", []), ("GPU", [torch.device("cuda", 0)])):
        for _ in range(2):  # the first loads libraries
            start = time.perf_counter()
            merge_tensors("regmean", models, base, statistics=grams, devices=devices)
            seconds[name] = time.perf_counter() - start
    return seconds


def merge_here(recipe: Path, out: Path, gpu: bool) -> None:
    """Merges in this process, by the GPUs whatever the method, or by the processor; prints the merge's seconds."""
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] if gpu else []
    engine.accelerators = lambda plan: devices
    merge(recipe, out)
    print(json.loads((out / "merge.json").read_text())["seconds"])


def merge_seconds(recipe: Path, out: Path, cores: int, gpu: bool) -> tuple[float, float]:
    """Returns the seconds of a merge by a process of its own, without and with its start."""
    shutil.rmtree(out, ignore_errors=True)
    chosen = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    command = ["taskset", "-c", chosen, sys.executable, __file__, "--dir", str(out), "--merge", str(recipe)]
    start = time.perf_counter()
    done = subprocess.run([*command, *(["--gpu"] if gpu else [])], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1]), time.perf_counter() - start


def main() -> None:
    """Prints the differences, and a table of seconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--cores", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--merge", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gpu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.merge:
        merge_here(options.merge, options.dir, options.gpu)
        return
    if not torch.cuda.is_available():
        print("gpu_merge.py: this machine has no CUDA device", file=sys.stderr)
        raise SystemExit(2)
    differences = largest_differences()
    print(json.dumps({"device": torch.cuda.get_device_name(), "largest differences": differences}), flush=True)
    print(json.dumps({"regmean, seconds a layer": solve_seconds()}), flush=True)
    write_models(options.dir, "1.1b")
    warm(options.dir)
    recipe = options.dir / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipes(options.dir)["linear"]))
    for cores in options.cores:
        row: dict[str, Any] = {"method": "linear", "cores": cores}
        for name, gpu in (("processor", False), ("GPU", True)):
            runs = [merge_seconds(recipe, options.dir / "out", cores, gpu) for _ in range(options.repeats)]
            row[name] = [round(statistics.median(column), 2) for column in zip(*runs, strict=True)]
        print(json.dumps(row), flush=True)
    raise SystemExit(int(differences["linear"] > 0 or max(differences.values()) > _TOLERANCE))


if __name__ == "__main__":
    main()
