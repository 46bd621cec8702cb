"""Measures the tokens a second of supervised fine-tuning, against TRL, padded and packed.

    python benchmarks/sft_vs_trl.py --model DIR --data gsm8k_train.jsonl --peer-python OTHER/bin/python
        [--steps 20] [--method lora] [--length 512] [--against padded packed float32 compiled] [--isa AVX2]

The peer has a virtual environment of its own (``pip install trl==1.16.0 peft`` with the constraints of this project).
Ours and a peer train a step in turn, each in a process of its own, on the same examples in the same order:
SmolLM2-135M, GSM8K's questions and answers, the answers supervised, 8 examples an optimiser step, AdamW, ours in the
precision that ``auto`` chooses (TRL: float32 weights under bfloat16 autocast, as it recommends; packed: 4 rows of 512;
``float32``: padded, without autocast). ``compiled`` is ours with ``train.compile``. ``--isa`` limits the instruction
set of all contenders' products, by oneDNN's variable ``ONEDNN_MAX_CPU_ISA``.
With ``--method lora`` all train an adapter of rank 16 on all linear layers instead; with ``--length`` examples are
joined and cut to this many tokens. The benchmark reports tokens without padding a second (the median step, the first
two left out), the process's peak memory, and the loss of each step.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from contenders import StepOnRequestSink, compare

_OURS = "--ours"
ROWS = 8
PACKED_SHAPE = 4, 512


def examples(model: str, data: str, length: int | None) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield examples as token ids with their mask, so that all contenders train on the same."""
    from posttrain.models.language_model import load_language_model
    from posttrain.models.task import TaskConfig

    lm = load_language_model(Path(model), TaskConfig())
    ids: list[int] = []
    mask: list[bool] = []
    with open(data, encoding="utf-8") as file:
        for row in map(json.loads, file):
            example = lm.encode([{"role": "user", "content": row["question"]}], row["answer"])
            ids, mask = ids + list(example.ids), mask + list(example.supervised)
            if length is None or len(ids) >= length:
                yield ids[:length], mask[:length]
                ids, mask = [], []


def ours(model: str, data: str, method: str, mode: str) -> None:
    """Train with this program's trainer; print one line of JSON a step."""
    import torch

    from posttrain.models.chat import TokenizedExample
    from posttrain.models.language_model import load_language_model
    from posttrain.models.precision import choose_precision
    from posttrain.models.task import TaskConfig
    from posttrain.train.config import TrainConfig
    from posttrain.train.lora import add_adapter
    from posttrain.train.objectives.sft import SftObjective
    from posttrain.train.trainer import Trainer

    torch.set_num_threads(2)
    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    units = [[TokenizedExample(row["input_ids"], [bool(flag) for flag in row["completion_mask"]])] for row in rows]
    config = TrainConfig.read(
        {
            "epochs": 1, "batch_size": ROWS, "micro_batch_tokens": 4096, "shuffle": False, "learning_rate": 2e-5,
            "schedule": {"name": "constant", "warmup": 0.0},
            "optimizer": {"betas": [0.9, 0.999], "weight_decay": 0.0},
            "checkpoint": {"every_seconds": None}, "method": method, "compile": mode == "compiled",
            "precision": choose_precision(),
        },
        "benchmark",
    )  # fmt: skip
    lm = load_language_model(Path(model), TaskConfig(), config.dtype)
    if method == "lora":
        lm = add_adapter(lm, config.lora)
    with tempfile.TemporaryDirectory() as scratch:
        sys.stdin.readline()
        Trainer(lm, SftObjective(units, config), config, 0, Path(scratch), StepOnRequestSink()).train()


def main() -> None:
    """Compare with all contenders and print a table."""
    if sys.argv[1:2] == [_OURS]:
        ours(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--method", choices=["full", "lora"], default="full")
    parser.add_argument("--length", type=int)
    parser.add_argument("--against", nargs="+", default=["padded", "packed", "compiled"])
    parser.add_argument("--isa", help="such as AVX2 or AVX512_CORE_BF16")
    arguments = parser.parse_args()
    if arguments.isa:
        os.environ["ONEDNN_MAX_CPU_ISA"] = arguments.isa  # all contenders inherit it
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "examples.jsonl"
        with data.open("w", encoding="utf-8") as file:
            token_examples = examples(arguments.model, arguments.data, arguments.length)
            for _, (ids, mask) in zip(range(ROWS * arguments.steps), token_examples, strict=False):
                print(json.dumps({"input_ids": ids, "completion_mask": list(map(int, mask))}), file=file)
        command = [sys.executable, __file__, _OURS, arguments.model, str(data), arguments.method]
        peer = [arguments.peer_python, str(Path(__file__).with_name("peers") / "trl_sft.py")]
        peer_command = [*peer, arguments.model, str(data), str(arguments.steps), arguments.method]
        contenders = {
            "padded": ("TRL, padded", [*peer_command, "padded", str(ROWS), "0"]),
            "packed": ("TRL, packed", [*peer_command, "packed", *map(str, PACKED_SHAPE)]),
            "float32": ("TRL, padded, float32", [*peer_command, "float32", str(ROWS), "0"]),
            "compiled": ("ours, compiled", [*command, "compiled"]),
        }
        compare([*command, "plain"], dict(contenders[name] for name in arguments.against))


if __name__ == "__main__":
    main()
