"""Measures the speed of full fine-tuning of a 1B and an 8B Llama on a GPU, against TRL with Liger kernels.

    python benchmarks/gpu_sft.py --peer-python OTHER/bin/python [--shapes 1b 8b] [--steps 14] [--json FILE]

The peer has a virtual environment of its own: ``pip install trl==1.16.0 liger-kernel flash-attn``. Each contender is a
process of its own, with random weights, bfloat16 matrix products and the same synthetic sequences: lengths are
log-normal (median 400, standard deviation 0.8 of the logarithm, 32 to 4096), the last two thirds are supervised, 64
sequences an optimiser step. TRL runs padding-free on these steps, and packed ("bfd") on as many tokens a step.

- 1B: weights and AdamW in float32 for all (TRL: under bfloat16 autocast), no activations recomputed.
- 8B: activations recomputed. Ours keeps float32 master weights with 8-bit AdamW, 12 bytes a weight, so it needs more
  than 100 GB; TRL keeps everything in bfloat16, 8 bytes a weight.

The benchmark reports tokens a second (the median step, the first four left out), the FLOPs that the model's own work
needs (``posttrain.train.monitor.meter.training_flops``) as a share of the measured matrix-product peak, and the peak of
allocated bytes. ``--json`` names a file that gets one line a step. A contender that runs out of memory has a row that
says so.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

WARM_UP = 4
SEQUENCES = 64
MAX_LENGTH = 4096
SHAPES: dict[str, Row] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip
SETTINGS: dict[str, Row] = {
    "1b": {"optimizer": "adamw", "recompute": "none", "peer_dtype": "float32"},
    "8b": {"optimizer": "adam8bit", "recompute": "full", "peer_dtype": "bfloat16"},
}


def sequences(count: int, vocabulary: int) -> list[Row]:
    """Return random sequences, the same in every call, in the form of TRL's datasets."""
    generator = np.random.default_rng(0)
    lengths = np.clip(np.exp(generator.normal(np.log(400), 0.8, count)), 32, MAX_LENGTH).astype(int)
    return [
        {
            "input_ids": generator.integers(1000, vocabulary, length).tolist(),
            "completion_mask": [int(position >= length // 3) for position in range(length)],
        }
        for length in lengths
    ]


def ours(shape: str, data: Path) -> None:
    """Train with this program's trainer; print one line of JSON a step."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from posttrain.models.chat import TokenizedExample
    from posttrain.models.language_model import LanguageModel
    from posttrain.models.machine_rate import matmul_rate
    from posttrain.models.task import TaskConfig
    from posttrain.models.tiny import byte_tokenizer
    from posttrain.train.config import TrainConfig
    from posttrain.train.objectives.sft import SftObjective
    from posttrain.train.trainer import Trainer

    settings = SETTINGS[shape]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=torch.bfloat16)
    config = TrainConfig.read(
        {
            "epochs": 1, "batch_size": SEQUENCES, "shuffle": False, "learning_rate": 1e-5, "compile": True,
            "max_length": MAX_LENGTH, "micro_batch_tokens": 4 * MAX_LENGTH,
            "schedule": {"name": "constant", "warmup": 0.0}, "optimizer": {"name": settings["optimizer"]},
            "checkpoint": {"every_seconds": None}, "recompute": settings["recompute"],
        },
        "benchmark",
    )  # fmt: skip
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    units = [[TokenizedExample(row["input_ids"], [bool(flag) for flag in row["completion_mask"]])] for row in rows]
    lm = LanguageModel(model, byte_tokenizer(), TaskConfig())
    print(json.dumps({"peak": matmul_rate(torch.bfloat16, "cuda")}))
    with tempfile.TemporaryDirectory() as scratch:
        for step in Trainer(lm, SftObjective(units, config), config, 0, Path(scratch)).train():
            print(
                json.dumps(
                    {"loss": step.loss, "tokens": step.tokens, "seconds": step.seconds, "bytes": step.memory_bytes}
                )
            )


_PEER_SCRIPT = """
import inspect, json, sys, time
import torch
from datasets import Dataset
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainerCallback
)
from transformers.masking_utils import flash_attention_mask
from trl import SFTConfig, SFTTrainer

def varlen(module, query, key, value, attention_mask, scaling=None, **options):
    starts, most = options["cu_seq_lens_q"], options["max_length_q"]
    q, k, v = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    shared = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    output = varlen_attn(q, k, v, starts, starts, most, most, scale=scaling, window_size=(-1, 0), **shared)
    return output[None], None

AttentionInterface.register("torch_varlen", varlen)
AttentionMaskInterface.register("torch_varlen", flash_attention_mask)
settings = json.loads(sys.argv[1])
torch.manual_seed(0)
dtype = getattr(torch, settings["peer_dtype"])
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**settings["shape"]), dtype=dtype, attn_implementation=settings["attention"]
    )
packed = settings["packed"]
config = SFTConfig(
    output_dir=settings["out"], max_steps=settings["steps"], optim="adamw_torch_fused", bf16=True, weight_decay=0.01,
    per_device_train_batch_size=4 if packed else 16, gradient_accumulation_steps=2 if packed else 4,
    packing=packed, padding_free=True, max_length=settings["longest"] if packed else None, use_liger_kernel=True,
    gradient_checkpointing=settings["recompute"] == "full", learning_rate=1e-5, lr_scheduler_type="constant",
    max_grad_norm=1.0, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, shuffle_dataset=False,
    completion_only_loss=True, train_sampling_strategy="sequential",
)

class StepTimer(TrainerCallback):
    def on_step_begin(self, *_, **__):
        torch.cuda.synchronize()
        self.start = time.perf_counter()
    def on_step_end(self, *_, **__):
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start
    def on_log(self, args, state, control, logs=None, **__):
        if "loss" in logs:
            row = {"loss": logs["loss"], "seconds": self.seconds, "bytes": torch.cuda.max_memory_allocated()}
            print(json.dumps(row | {"tokens": logs["num_tokens"]}), flush=True)

SFTTrainer(
    model=model, args=config, processing_class=AutoTokenizer.from_pretrained(settings["tokenizer"]),
    train_dataset=Dataset.from_list([json.loads(line) for line in open(settings["data"])]), callbacks=[StepTimer()],
).train()
"""


def run(command: list[str]) -> tuple[list[Row], str]:
    """Run a contender; return the rows that it prints, and the reason of its failure, empty if it ended well."""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith(('{"loss"', '{"peak"'))]
    if process.returncode == 0:
        return lines, ""
    out_of_memory = "OutOfMemoryError" in process.stderr or "out of memory" in process.stderr
    return lines, "out of memory" if out_of_memory else (process.stderr.strip().splitlines() or ["failed"])[-1]


def contenders(shape: str, folder: Path, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Write the contenders' data, and return their commands by name."""
    from posttrain.models.tiny import byte_tokenizer

    data, peer, tokenizer = folder / f"{shape}.jsonl", folder / "peer.py", folder / "tokenizer"
    rows = sequences(SEQUENCES * arguments.steps, SHAPES[shape]["vocab_size"])
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    peer.write_text(_PEER_SCRIPT, encoding="utf-8")
    byte_tokenizer().save_pretrained(tokenizer)
    commands = {"ours": [sys.executable, __file__, "--ours", shape, str(data)]}
    if arguments.peer_python:
        paths = {"data": str(data), "tokenizer": str(tokenizer), "out": str(folder / "out")}
        common = {"steps": arguments.steps, "longest": MAX_LENGTH, "attention": arguments.peer_attention, **paths}
        for name, packed in (("TRL padding-free, Liger", False), ("TRL packed, Liger", True)):
            settings = {**SETTINGS[shape], **common, "shape": SHAPES[shape], "packed": packed}
            commands[name] = [arguments.peer_python, str(peer), json.dumps(settings)]
    return commands


def flops_per_token(shape: str, data: Path) -> float:
    """Return the FLOPs of the model's own work on all sequences, divided by their tokens."""
    from transformers import LlamaConfig

    from posttrain.train.monitor.meter import DecoderSize, training_flops

    decoder = DecoderSize.from_config(LlamaConfig(**SHAPES[shape]))
    assert decoder is not None
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    lengths = [len(row["input_ids"]) for row in rows]
    tokens, pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
    return training_flops(decoder, tokens, pairs, sum(sum(row["completion_mask"]) for row in rows)) / tokens


def compare(shape: str, folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """Run all contenders, and return one row for each."""
    table, peak = [], None
    for name, command in contenders(shape, folder, arguments).items():
        lines, problem = run(command)
        peak = next((line["peak"] for line in lines if "peak" in line), peak)
        steps = [line for line in lines if "loss" in line]
        if name != "ours":  # TRL counts tokens from the start of training
            counts = [0, *(step["tokens"] for step in steps)]
            for step, before, after in zip(steps, counts, counts[1:], strict=False):
                step["tokens"] = after - before
        if arguments.json:
            with open(arguments.json, "a", encoding="utf-8") as file:
                for number, step in enumerate(steps):
                    print(json.dumps({"shape": shape, "contender": name, "step": number, **step}), file=file)
        row: Row = {"shape": shape, "name": name, "problem": problem or ("" if steps[WARM_UP:] else "too few steps")}
        if not row["problem"]:
            row["speed"] = statistics.median(step["tokens"] / step["seconds"] for step in steps[WARM_UP:])
            row["bytes"], row["loss"] = max(step["bytes"] for step in steps), steps[0]["loss"]
            row["mfu"] = row["speed"] * flops_per_token(shape, folder / f"{shape}.jsonl") / peak if peak else None
        table.append(row)
    return table


def main() -> None:
    """Run all shapes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python")
    parser.add_argument(
        "--peer-attention",
        default="flash_attention_2",
        help="the attention implementation, by transformers' name; torch_varlen: PyTorch's own FlashAttention kernel,"
        " which needs no flash-attn",
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--json", help="a file that gets one line a step")
    parser.add_argument("--ours", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("gpu_sft.py: this machine has no CUDA device", file=sys.stderr)
        raise SystemExit(2)
    if arguments.ours:
        ours(arguments.ours[0], Path(arguments.ours[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for shape in arguments.shapes for row in compare(shape, Path(folder), arguments)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print("| shape | contender | tokens/s | ratio | MFU | peak memory, GiB | first loss |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        prefix = f"| {row['shape']} | {row['name']} "
        if row["problem"]:
            print(f"{prefix}| {row['problem']} | | | | |")
            continue
        our_rows = (other for other in rows if (other["shape"], other["name"]) == (row["shape"], "ours"))
        our_speed = next((other.get("speed") for other in our_rows), None)
        ratio = f"{our_speed / row['speed']:.2f}" if our_speed else ""
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else ""
        print(f"{prefix}| {row['speed']:.0f} | {ratio} | {mfu} | {row['bytes'] / 2**30:.1f} | {row['loss']:.4f} |")


if __name__ == "__main__":
    main()
