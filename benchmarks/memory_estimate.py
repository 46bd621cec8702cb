"""Measures the error of the memory estimate of ``posttrain plan`` against the memory that training takes.

    python benchmarks/memory_estimate.py [--only WORD] [--json FILE]

Each setting runs in a process of its own, which estimates, trains two optimiser steps through `posttrain.train.train`,
and reports its peak: VmHWM of /proc/self/status, the peak of its resident bytes. (``ru_maxrss`` would start with the
peak of the parent process.) Models have random weights in the shapes of small models; texts are random letters, one
token each. The benchmark prints each setting's estimate, measurement and error, and the median and worst error.
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
_NO_CHECKPOINTS = {"checkpoint": {"every_seconds": None}}
_RESULT = "RESULT"
_LORA = {"method": "lora", **_NO_CHECKPOINTS}


def _setting(model: str, tokens: int, length: int, supervised: float = 1.0, **train: Any) -> dict[str, Any]:
    return {"model": model, "tokens": tokens, "length": length, "supervised": supervised, "train": train}


SETTINGS = [
    _setting("smollm2-135m", 1024, 256, **_NO_CHECKPOINTS),
    _setting("smollm2-135m", 4096, 512, **_NO_CHECKPOINTS),
    _setting("smollm2-135m", 2048, 256, 0.3),
    _setting("smollm2-135m", 4096, 1024, recompute="full", **_NO_CHECKPOINTS),
    _setting("smollm2-135m", 4096, 512, recompute="50%", **_NO_CHECKPOINTS),
    _setting("smollm2-135m", 2048, 256, optimizer={"name": "adafactor"}, **_NO_CHECKPOINTS),
    _setting("smollm2-135m", 1024, 128, precision="float32", optimizer={"name": "sgd"}, **_NO_CHECKPOINTS),
    _setting("smollm2-135m", 2048, 512, precision="autocast", **_NO_CHECKPOINTS),
    _setting("smollm2-135m", 4096, 512, **_LORA),
    _setting("smollm2-135m", 2048, 256, 0.3, recompute="full", **_LORA),
    _setting("smollm2-135m", 2048, 256, precision="float32", **_LORA),
    _setting("smollm2, 10 layers", 512, 128, **_NO_CHECKPOINTS),
    _setting("smollm2, 10 layers", 4096, 256),
    _setting("smollm2, 10 layers", 8192, 1024, 0.3, **_NO_CHECKPOINTS),
    _setting("smollm2, 10 layers", 4096, 512, optimizer={"name": "muon"}, **_NO_CHECKPOINTS),
    _setting("smollm2, 10 layers", 2048, 512, precision="float32", **_NO_CHECKPOINTS),
    _setting("smollm2, 10 layers", 8192, 512, recompute="full", **_NO_CHECKPOINTS),
    _setting("smollm2, 10 layers", 4096, 256, recompute="50%", **_NO_CHECKPOINTS),
    _setting("smollm2, 10 layers", 2048, 256, 0.3, precision="autocast", **_LORA),
    _setting("smollm2, 10 layers", 4096, 512, lora={"rank": 64, "dropout": 0.1}, **_LORA),
    _setting("llama 30M", 4096, 128, **_NO_CHECKPOINTS),
    _setting("llama 30M", 8192, 1024, **_NO_CHECKPOINTS),
    _setting("llama 30M", 16384, 512, 0.2, recompute="50%"),
    _setting("llama 30M", 2048, 512, precision="float32", optimizer={"name": "adafactor"}, **_NO_CHECKPOINTS),
    _setting("llama 30M", 8192, 512, 0.3, **_LORA),
    _setting("qwen3 80M, untied", 2048, 256, **_NO_CHECKPOINTS),
    _setting("qwen3 80M, untied", 4096, 512, 0.3),
    _setting("qwen3 80M, untied", 2048, 512, precision="float32", recompute="full", **_NO_CHECKPOINTS),
    _setting("qwen3 80M, untied", 4096, 256, optimizer={"name": "muon"}, **_NO_CHECKPOINTS),
    _setting("qwen3 80M, untied", 4096, 512, **_LORA),
]


def write_model(model: str, folder: Path) -> None:
    """Write a model with random bfloat16 weights and a tokenizer with one token a letter."""
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


def run_setting(setting: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Estimate the memory of a setting, train it, and return the estimate and the measured peak."""
    import pyarrow as pa

    from posttrain.data.records.record import RECORD
    from posttrain.jobs.memory import peak_bytes, process_bytes
    from posttrain.models.shape import read_config
    from posttrain.models.task import TaskConfig
    from posttrain.train.config import TrainConfig
    from posttrain.train.memory.estimate import MicroBatch, estimate_memory
    from posttrain.train.memory.weights import ModelSpec
    from posttrain.train.stage import train

    tokens, length = setting["tokens"], setting["length"]
    rows = tokens // length
    # Named, as the default is the faster one of two precisions on each machine.
    shared = {"precision": "bfloat16", "epochs": 2, "batch_size": rows, "micro_batch_tokens": tokens}
    config = TrainConfig.read({**shared, "max_length": length, **setting["train"]}, "x")
    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz ", k=length)) for _ in range(rows)]
    answer_tokens = round(setting["supervised"] * length)
    all_supervised = setting["supervised"] == 1
    records = pa.Table.from_pylist(
        [
            {
                "id": f"{row:020x}",
                "input_id": f"{row:020x}",
                # Two tokens mark the prompt, and one ends the answer.
                "prompt": None if all_supervised else [{"role": "user", "content": text[: length - answer_tokens - 2]}],
                "completion": None if all_supervised else text[: answer_tokens - 1],
                "rejected": None,
                "text": text[: length - 1] if all_supervised else None,
                "group": None,
                "source": "f",
                "line": row,
                "meta": "{}",
            }
            for row, text in enumerate(texts)
        ],
        schema=RECORD,
    )
    input_tokens = rows * (length - 1)
    batch = MicroBatch(input_tokens, input_tokens if all_supervised else rows * answer_tokens, length - 1)
    spec = ModelSpec.from_config(read_config(str(folder)), config)
    estimate = estimate_memory(spec, config, batch, process=process_bytes())
    with tempfile.TemporaryDirectory() as scratch:
        train(folder, records, config, TaskConfig(), seed=0, out=Path(scratch) / "out", scratch=Path(scratch) / "kept")
    return {"estimate": estimate.total, "parts": estimate.parts, "measured": peak_bytes()}


def main() -> None:
    """Run every setting and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run only the settings whose line contains this text")
    parser.add_argument("--json", type=Path, help="file for all parts of the estimates")
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write-model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write_model:
        write_model(arguments.write_model, arguments.folder)
        return
    if arguments.setting:
        # The prefix marks the result among the lines that libraries print.
        print(_RESULT + json.dumps(run_setting(json.loads(arguments.setting), arguments.folder)))
        return
    print("| model | tokens × length, supervised | train | estimate, GiB | measured, GiB | error |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    errors, results = [], []
    with tempfile.TemporaryDirectory() as root:
        for setting in SETTINGS:
            train = json.dumps(setting["train"])[1:-1].replace('"', "")
            line = f"| {setting['model']} | {setting['tokens']} × {setting['length']}, {setting['supervised']:.0%}"
            line += f" | {train.replace('checkpoint: {every_seconds: null}', 'no checkpoints')} |"
            if arguments.only not in line:
                continue
            folder = Path(root) / f"model{list(MODELS).index(setting['model'])}"
            if not folder.exists():
                _run("--write-model", setting["model"], "--folder", str(folder))
            output = _run("--setting", json.dumps(setting), "--folder", str(folder))
            result_line = next(text for text in output.splitlines() if text.startswith(_RESULT))
            result = json.loads(result_line.removeprefix(_RESULT))
            error = result["estimate"] / result["measured"] - 1
            errors.append(error)
            results.append({"setting": setting, **result})
            estimate, peak = result["estimate"] / 2**30, result["measured"] / 2**30
            print(f"{line} {estimate:.2f} | {peak:.2f} | {error:+.1%} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    sizes = [abs(error) for error in errors]
    print(f"\n{len(errors)} settings: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


def _run(*arguments: str) -> str:
    process = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{' '.join(arguments)}\n{process.stderr}")
    return process.stdout


if __name__ == "__main__":
    main()
