"""How many tokens a second does fine-tuning take in? Ours against TRL, padded and packed.

    python benchmarks/sft_vs_trl.py --model DIR --data gsm8k_train.jsonl --peer-python OTHER/bin/python
        [--steps 20] [--method lora]

The peer has a virtual environment of its own (``pip install trl==1.16.0 peft`` with the constraints of this project).
Every contender is a process of its own, on the same examples in the same order: SmolLM2-135M, GSM8K's questions and
answers, the answers supervised, 8 examples an optimiser step, AdamW, bfloat16; ours twice, plain and with
``train.compile``. With ``--method lora`` an adapter of rank 16 on all linear layers is trained instead. Reported are
tokens without padding a second (the median step, the first two left out), the process's peak memory, and the loss of
each step.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from contenders import run

_OURS = "--ours"
ROWS = 8
PACKED = 512


def examples(model: str, data: str, count: int, out: Path) -> None:
    """Write the first ``count`` examples as token ids with their mask, so that all train on the same."""
    from posttrain.models.language_model import load
    from posttrain.models.task import TaskConfig

    lm = load(Path(model), TaskConfig())
    with open(data, encoding="utf-8") as file, out.open("w", encoding="utf-8") as written:
        for _ in range(count):
            row = json.loads(next(file))
            found = lm.encode([{"role": "user", "content": row["question"]}], row["answer"])
            print(
                json.dumps({"input_ids": found.ids, "completion_mask": [int(on) for on in found.supervised]}),
                file=written,
            )


def ours(model: str, data: str, method: str, compiled: bool) -> None:
    """Train with this program's trainer; one line of JSON a step."""
    import torch

    from posttrain.models.chat import Encoded
    from posttrain.models.language_model import load
    from posttrain.models.task import TaskConfig
    from posttrain.train.config import TrainConfig
    from posttrain.train.lessons.log_probabilities import Supervised
    from posttrain.train.lora import adapt
    from posttrain.train.trainer import Trainer

    torch.set_num_threads(2)
    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    units = [[Encoded(row["input_ids"], [bool(on) for on in row["completion_mask"]])] for row in rows]
    config = TrainConfig.read(
        {
            "epochs": 1, "batch_size": ROWS, "micro_batch_tokens": 4096, "shuffle": False, "learning_rate": 2e-5,
            "schedule": {"name": "constant", "warmup": 0.0},
            "optimizer": {"betas": [0.9, 0.999], "weight_decay": 0.0},
            "checkpoint": {"every_seconds": None}, "method": method, "compile": compiled,
        },
        "benchmark",
    )  # fmt: skip
    lm = load(Path(model), TaskConfig())
    if method == "lora":
        lm = adapt(lm, config.lora)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(lm, Supervised(units, config), config, 0, Path(scratch))
        for step in trainer.fit():
            print(
                json.dumps(
                    {"loss": step.loss, "tokens": step.tokens, "seconds": step.seconds, "bytes": step.memory_bytes}
                )
            )


_PEER = """
import json, resource, sys, time
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

torch.set_num_threads(2)
model, data, steps, packed, rows, length, method = sys.argv[1:]
examples = [json.loads(line) for line in open(data)]
config = SFTConfig(
    output_dir=sys.argv[2] + ".peer", max_steps=int(steps),
    per_device_train_batch_size=4 if packed == "packed" else int(rows),
    learning_rate=2e-5, lr_scheduler_type="constant", bf16=True, use_cpu=True, gradient_checkpointing=False,
    packing=packed == "packed", max_length=int(length) if packed == "packed" else None, shuffle_dataset=False,
    weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
    completion_only_loss=True, dataset_kwargs={"skip_prepare_dataset": False}, model_init_kwargs={"dtype": "float32"},
    train_sampling_strategy="sequential",
)

class Timed(TrainerCallback):
    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()
    def on_step_end(self, *_, **__):
        self.seconds = time.perf_counter() - self.start
    def on_log(self, args, state, control, logs=None, **__):
        if "loss" in logs:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            found = {"loss": logs["loss"], "seconds": self.seconds, "bytes": peak, "tokens": logs["num_tokens"]}
            print(json.dumps(found), flush=True)

adapter = None
if method == "lora":
    from peft import LoraConfig
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(
    model=model, args=config, train_dataset=Dataset.from_list(examples), callbacks=[Timed()], peft_config=adapter
)
trainer.train()
"""


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--method", choices=["full", "lora"], default="full")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "examples.jsonl"
        examples(arguments.model, arguments.data, ROWS * arguments.steps, data)
        peer = Path(folder) / "peer.py"
        peer.write_text(_PEER, encoding="utf-8")
        mine = [sys.executable, __file__, _OURS, arguments.model, str(data), arguments.method]
        theirs = [arguments.peer_python, str(peer), arguments.model, str(data), str(arguments.steps)]
        sizes = [str(ROWS), str(PACKED), arguments.method]
        found = {
            "ours": run([*mine, "plain"]).steps,
            "ours, compiled": run([*mine, "compiled"]).steps,
            "TRL padded": run([*theirs, "padded", *sizes]).steps,
            "TRL packed": run([*theirs, "packed", *sizes]).steps,
        }
    for name, steps in found.items():
        print(name, [round(step["loss"], 4) for step in steps])
        if name.startswith("TRL"):  # which counts tokens from the beginning
            counts = [0, *(step["tokens"] for step in steps)]
            for step, before, after in zip(steps, counts, counts[1:], strict=False):
                step["tokens"] = after - before
    print("| contender | tokens/s | ours is faster by | ours, compiled | peak memory, GiB |")
    print("| --- | ---: | ---: | ---: | ---: |")
    speeds = {name: statistics.median(s["tokens"] / s["seconds"] for s in steps[2:]) for name, steps in found.items()}
    for name, steps in found.items():
        peak = max(step["bytes"] for step in steps) / 2**30
        plain, compiled = (speeds[mine] / speeds[name] for mine in ("ours", "ours, compiled"))
        print(f"| {name} | {speeds[name]:.0f} | {plain:.2f} | {compiled:.2f} | {peak:.1f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == [_OURS]:
        ours(*sys.argv[2:5], compiled=sys.argv[5] == "compiled")
    else:
        main()
