"""How far is the estimate of ``posttrain plan`` from the memory that training takes?

    python benchmarks/memory_estimate.py [--only WORD] [--json FILE]

Every setting is a process of its own that estimates, trains two optimiser steps through `posttrain.train.train`, and
reports its peak: VmHWM of /proc/self/status, the most bytes that were ever resident. (``ru_maxrss`` is inherited from
the process that started it.) Models have random weights in the shapes of small models; texts are random letters, one
token each. The measurement is the peer. Printed are each setting's estimate, measurement and error, and the median and
the worst of the errors.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"kind": "llama"},
    "smollm2, 10 layers": {"kind": "llama", "num_hidden_layers": 10},
    "llama 30M": {
        "kind": "llama",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 16384,
    },
    "qwen3 80M, untied": {
        "kind": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 14,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32768,
        "tie_word_embeddings": False,
    },
}
_SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_KEPT_NOTHING = {"checkpoint": {"every_seconds": None}}
_LORA = {"method": "lora", **_KEPT_NOTHING}


def _setting(model: str, tokens: int, length: int, supervised: float = 1.0, **train: Any) -> dict[str, Any]:
    return {"model": model, "tokens": tokens, "length": length, "supervised": supervised, "train": train}


SETTINGS = [
    _setting("smollm2-135m", 1024, 256, **_KEPT_NOTHING),
    _setting("smollm2-135m", 4096, 512, **_KEPT_NOTHING),
    _setting("smollm2-135m", 2048, 256, 0.3),
    _setting("smollm2-135m", 4096, 1024, recompute="full", **_KEPT_NOTHING),
    _setting("smollm2-135m", 4096, 512, recompute={"mode": "selective", "budget": "40%"}, **_KEPT_NOTHING),
    _setting("smollm2-135m", 2048, 256, optimizer={"name": "adafactor"}, **_KEPT_NOTHING),
    _setting("smollm2-135m", 1024, 128, precision="float32", optimizer={"name": "sgd"}, **_KEPT_NOTHING),
    _setting("smollm2-135m", 2048, 512, precision="autocast", **_KEPT_NOTHING),
    _setting("smollm2-135m", 4096, 512, **_LORA),
    _setting("smollm2-135m", 2048, 256, 0.3, recompute="full", **_LORA),
    _setting("smollm2-135m", 2048, 256, precision="float32", **_LORA),
    _setting("smollm2, 10 layers", 512, 128, **_KEPT_NOTHING),
    _setting("smollm2, 10 layers", 4096, 256),
    _setting("smollm2, 10 layers", 8192, 1024, 0.3, **_KEPT_NOTHING),
    _setting("smollm2, 10 layers", 4096, 512, optimizer={"name": "muon"}, **_KEPT_NOTHING),
    _setting("smollm2, 10 layers", 2048, 512, precision="float32", **_KEPT_NOTHING),
    _setting("smollm2, 10 layers", 8192, 512, recompute="full", **_KEPT_NOTHING),
    _setting("smollm2, 10 layers", 4096, 256, recompute={"mode": "selective", "budget": "60%"}, **_KEPT_NOTHING),
    _setting("smollm2, 10 layers", 2048, 256, 0.3, precision="autocast", **_LORA),
    _setting("smollm2, 10 layers", 4096, 512, lora={"rank": 64, "dropout": 0.1}, **_LORA),
    _setting("llama 30M", 4096, 128, **_KEPT_NOTHING),
    _setting("llama 30M", 8192, 1024, **_KEPT_NOTHING),
    _setting("llama 30M", 16384, 512, 0.2, recompute={"mode": "selective", "budget": "30%"}),
    _setting("llama 30M", 2048, 512, precision="float32", optimizer={"name": "adafactor"}, **_KEPT_NOTHING),
    _setting("llama 30M", 8192, 512, 0.3, **_LORA),
    _setting("qwen3 80M, untied", 2048, 256, **_KEPT_NOTHING),
    _setting("qwen3 80M, untied", 4096, 512, 0.3),
    _setting("qwen3 80M, untied", 2048, 512, precision="float32", recompute="full", **_KEPT_NOTHING),
    _setting("qwen3 80M, untied", 4096, 256, optimizer={"name": "muon"}, **_KEPT_NOTHING),
    _setting("qwen3 80M, untied", 4096, 512, **_LORA),
]


def make(model: str, folder: Path) -> None:
    """Write a model with random bfloat16 weights and the tokenizer of one token a letter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from posttrain.models.tiny import byte_tokenizer

    settings = _SMOLLM2 | MODELS[model]
    tokenizer = byte_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(settings.pop("kind"), **settings, **special)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(setting: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Estimate, train, and say what came of both."""
    import pyarrow as pa

    from posttrain.data.records.schema import RECORD
    from posttrain.models.shape import read_config
    from posttrain.models.task import TaskConfig
    from posttrain.train.config import TrainConfig
    from posttrain.train.memory.estimate import estimate_memory
    from posttrain.train.memory.micro_batch import MicroBatch
    from posttrain.train.memory.weights import ModelSpec
    from posttrain.train.monitor.meter import peak_bytes, process_bytes
    from posttrain.train.stage import train

    tokens, length = setting["tokens"], setting["length"]
    rows = tokens // length
    config = TrainConfig.read(
        {"epochs": 2, "batch_size": rows, "micro_batch_tokens": tokens, "max_length": length, **setting["train"]}, "x"
    )
    letters = random.Random(0)
    words = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz ", k=length)) for _ in range(rows)]
    answer = round(setting["supervised"] * length)
    whole = setting["supervised"] == 1
    records = pa.Table.from_pylist(
        [
            {
                "id": f"{row:020x}",
                "input_id": f"{row:020x}",
                # Two marks around the prompt, and one that ends the answer.
                "prompt": None if whole else [{"role": "user", "content": text[: length - answer - 2]}],
                "completion": None if whole else text[: answer - 1],
                "rejected": None,
                "text": text[: length - 1] if whole else None,
                "group": None,
                "source": "f",
                "line": row,
                "meta": "{}",
            }
            for row, text in enumerate(words)
        ],
        schema=RECORD,
    )
    read = rows * (length - 1)
    pairs, scores = rows * length * (length - 1) // 2, rows * (length - 1) ** 2
    batch = MicroBatch(read, read if whole else rows * answer, pairs, read, read, scores, length - 1)
    blueprint = ModelSpec.of(read_config(str(folder)), config)
    found = estimate_memory(blueprint, config, batch, process=process_bytes())
    with tempfile.TemporaryDirectory() as scratch:
        train(folder, records, config, TaskConfig(), seed=0, out=Path(scratch) / "out", scratch=Path(scratch) / "kept")
    return {"estimate": found.total, "phase": found.peak, "parts": found.parts, "measured": peak_bytes()}


def main() -> None:
    """Run every setting and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only settings whose line holds this")
    parser.add_argument("--json", type=Path, help="where to write all parts of the estimates")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make, arguments.folder)
        return
    if arguments.one:
        print("FOUND" + json.dumps(measure(json.loads(arguments.one), arguments.folder)))
        return
    print("| model | tokens × length, supervised | train | estimate, GiB | measured, GiB | error |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    errors, kept = [], []
    with tempfile.TemporaryDirectory() as root:
        for setting in SETTINGS:
            words = json.dumps(setting["train"])[1:-1].replace('"', "")
            line = f"| {setting['model']} | {setting['tokens']} × {setting['length']}, {setting['supervised']:.0%}"
            line += f" | {words.replace('checkpoint: {every_seconds: null}', 'no checkpoints')} |"
            if arguments.only not in line:
                continue
            folder = Path(root) / f"model{list(MODELS).index(setting['model'])}"
            if not folder.exists():
                _run("--make", setting["model"], "--folder", str(folder))
            said = _run("--one", json.dumps(setting), "--folder", str(folder))
            found = json.loads(next(one for one in said.splitlines() if one.startswith("FOUND")).removeprefix("FOUND"))
            error = found["estimate"] / found["measured"] - 1
            errors.append(error)
            kept.append({"setting": setting, **found})
            print(
                f"{line} {found['estimate'] / 2**30:.2f} | {found['measured'] / 2**30:.2f} | {error:+.1%} |", flush=True
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    sizes = [abs(error) for error in errors]
    print(f"\n{len(errors)} settings: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


def _run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
