"""Measures time and memory of merging, ours and mergekit's in turn, and of copying the same bytes.

    python benchmarks/merge_vs_mergekit.py --peer OTHER/bin/mergekit-yaml --dir DIR
        [--shape 1.1b] [--repeats 3] [--methods linear slerp task_arithmetic ties dare_linear] [--peer-repeats 1]

mergekit has a virtual environment of its own (``pip install mergekit==0.1.5``). DIR gets a base and three models of a
Llama's shape in bfloat16, drawn at random (weights of standard deviation 0.02, task vectors of 0.001), in files of 600
MB: 35m has 0.04, 0.1b 0.13, 1.1b 1.1 and 3b 3.2 billion weights. Both programs read the same recipe, start included,
with the files in the page cache; each run is a process of its own. Memory is that of all its processes, each page once.
``cp`` copies the inputs of a linear merge of two, and waits for the disk as our merge does (``sync -d``), and once more
without. The table gives medians.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

SHAPES = {
    # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "35m": (384, 1024, 12, 6, 2, 49152),
    "0.1b": (576, 1536, 30, 9, 3, 49152),
    "1.1b": (2048, 5632, 22, 32, 4, 32000),
    "3b": (3072, 8192, 28, 24, 8, 128256),
}
MODELS = ("base", "a", "b", "c")
SHARD = "600MB"


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the recipe of each method, as both programs read it."""
    base, a, b, c = (str(folder / name) for name in MODELS)
    pair = [{"model": a, "parameters": {"weight": 0.5}}, {"model": b, "parameters": {"weight": 0.5}}]
    three = [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in (a, b, c)]
    tasks = [{"model": name, "parameters": {"weight": 0.5}} for name in (a, b, c)]
    common = {"dtype": "bfloat16"}
    return {
        "linear": {"merge_method": "linear", "models": pair} | common,
        "slerp": {
            "merge_method": "slerp",
            "base_model": a,
            "models": [{"model": a}, {"model": b}],
            "parameters": {"t": 0.5},
        }
        | common,
        "task_arithmetic": {"merge_method": "task_arithmetic", "base_model": base, "models": tasks} | common,
        "ties": {"merge_method": "ties", "base_model": base, "models": three, "parameters": {"normalize": True}}
        | common,
        "dare_linear": {"merge_method": "dare_linear", "base_model": base, "models": three} | common,
    }


def write_models(folder: Path, shape: str) -> None:
    """Writes the base and its three relatives, unless they are there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from posttrain.models.tiny import byte_tokenizer

    hidden, intermediate, layers, heads, keys, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        tie_word_embeddings=shape != "1.1b",
        dtype="bfloat16",
    )
    if (folder / MODELS[-1] / "config.json").is_file():
        return
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model = model.to_empty(device="cpu")
    model.tie_weights()  # to_empty gives a tied head weights of its own
    for number, name in enumerate(MODELS):
        generator = torch.Generator().manual_seed(0)
        change = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for weight in model.parameters():
                values = torch.randn(weight.shape, generator=generator).mul_(0.02)
                if number:
                    values.add_(torch.randn(weight.shape, generator=change), alpha=0.001)
                if weight.dim() == 1:
                    values.add_(1)  # norms near 0 would make the inputs of layers differ by orders of magnitude
                weight.copy_(values)
        model.save_pretrained(folder / name, max_shard_size=SHARD)
        byte_tokenizer().save_pretrained(folder / name)


def resident(process: int) -> int:
    """Returns the bytes that a process and those below it hold; of pages that several share, each its part (PSS)."""
    total = 0
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = int(line.split()[1]) << 10
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(resident(int(child)) for child in (task / "children").read_text().split())
    except OSError:
        pass  # it has ended meanwhile
    return total


def measure(command: Sequence[str], log: Path) -> tuple[float, float]:
    """Runs a command; returns its seconds, and the GB that its processes held at most, looked at ten times a second."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    start, peak = time.perf_counter(), 0
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        while True:
            try:
                process.wait(0.1)
                break
            except subprocess.TimeoutExpired:
                peak = max(peak, resident(process.pid))
    seconds = time.perf_counter() - start
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    return seconds, peak / 1e9


def warm(folder: Path) -> None:
    """Reads the inputs once, so that they lie in the page cache."""
    for file in folder.glob("*/*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def main() -> None:
    """Runs all methods and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", help="mergekit-yaml of the other environment")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-repeats", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=["linear", "slerp", "task_arithmetic", "ties", "dare_linear"])
    options = parser.parse_args()
    folder = options.dir / options.shape
    folder.mkdir(parents=True, exist_ok=True)
    # In a process of its own: the kernel counts a parent's memory as the child's until the child has begun.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(write_models, folder, options.shape).result()
    warm(folder)
    log, out, recipe = options.dir / "log.txt", options.dir / "out", options.dir / "recipe.yaml"
    for method in options.methods:
        recipe.write_text(yaml.safe_dump(recipes(folder)[method]))
        ours = [sys.executable, "-m", "posttrain", "merge", str(recipe), "--out", str(out)]
        peer = [options.peer, str(recipe), str(out), "--no-copy-tokenizer"] if options.peer else None
        rows: dict[str, list[tuple[float, float]]] = {"ours": [], "mergekit": []}
        for repeat in range(max(options.repeats, options.peer_repeats)):
            for name, command, count in (("ours", ours, options.repeats), ("mergekit", peer, options.peer_repeats)):
                if command is not None and repeat < count:
                    shutil.rmtree(out, ignore_errors=True)
                    rows[name].append(measure(command, log))
        shutil.rmtree(out, ignore_errors=True)
        medians = {
            name: [round(statistics.median(column), 2) for column in zip(*runs, strict=True)]
            for name, runs in rows.items()
            if runs
        }
        print(json.dumps({"method": method, "seconds and GB": medians, "runs": rows}), flush=True)
    inputs = [str(folder / name) for name in ("a", "b")]
    for name, command in (
        ("cp", ["cp", "-r", *inputs, str(out)]),
        ("cp and sync", ["sh", "-c", f"cp -r {inputs[0]} {inputs[1]} {out} && find {out} -type f | xargs sync -d"]),
    ):
        runs = []
        for _ in range(options.repeats):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            runs.append(measure(command, log)[0])
        shutil.rmtree(out, ignore_errors=True)
        print(json.dumps({name: round(statistics.median(runs), 2), "runs": runs}), flush=True)


if __name__ == "__main__":
    main()
