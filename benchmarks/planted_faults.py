"""Does a training survive what goes wrong, on its own, and end as well as one in which nothing did?

    python benchmarks/planted_faults.py --model DIR --data gsm8k_train.jsonl [--steps 40] [--seeds 3]

SmolLM2-135M on GSM8K's questions and answers, full fine-tuning in bfloat16, 4 examples a step. The clean training runs
once a seed, which shuffles the data: how far their final losses lie apart is the noise. Then each fault is planted in
the middle of the first seed's training: a batch whose loss is NaN, a gradient 100 times too large, and an allocation
that fails. The final loss is that of 64 examples which no training meets.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.packing import Unit, micro_batches, pack, packed_attention
from posttrain.models.task import TaskConfig
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.base import Objective, ObjectiveInputs
from posttrain.train.objectives.build import build_objective
from posttrain.train.objectives.loss import Loss
from posttrain.train.trainer import Trainer

ROWS = 4
HELD_OUT = 64
TOKENS = 2048


def scaled(factor: float) -> Callable[[Loss], Loss]:
    """A loss, and so its gradient, multiplied."""
    return lambda loss: Loss(loss.sum * factor, loss.count, loss.metrics)


def out_of_memory(loss: Loss) -> Loss:
    """What torch raises when an allocation fails."""
    raise torch.OutOfMemoryError("planted: out of memory")


FAULTS: dict[str, Callable[[Loss], Loss]] = {
    "a NaN batch": scaled(float("nan")),
    "a 100 times larger gradient": scaled(100.0),
    "out of memory": out_of_memory,
}


def plant(lesson: Objective, fault: Callable[[Loss], Loss], step: int) -> None:
    """Have the first loss of a step go wrong, once."""
    loss, begin, left = lesson.loss, lesson.begin, step + 1

    def counted(lm: LanguageModel, parts: Any) -> float:
        nonlocal left
        left -= 1
        return begin(lm, parts)

    def wrong(lm: LanguageModel, packed: Any, rows: Any) -> Loss:
        nonlocal left
        found = loss(lm, packed, rows)
        if left == 0:
            left = -1
            return fault(found)
        return found

    lesson.begin, lesson.loss = counted, wrong  # type: ignore[method-assign]


@torch.no_grad()
def held_out_loss(lm: LanguageModel, units: list[Unit], config: TrainConfig) -> float:
    """Nats a supervised token."""
    lesson, total, count = build_objective(ObjectiveInputs(units, config, lm)), 0.0, 0.0
    first = 0
    with packed_attention(lm, max(len(sequence.ids) for unit in units for sequence in unit)) as packs:
        for part in micro_batches(units, TOKENS):
            rows = list(range(first, first := first + len(part)))
            loss = lesson.loss(lm, pack(part, lm.device, padded=not packs), rows)
            total, count = total + loss.sum.item(), count + loss.count
    return total / count


def train(model: Path, units: list[Unit], config: TrainConfig, seed: int, fault: str | None) -> dict[str, Any]:
    """One training: its final loss and what was decided."""
    lm = load_language_model(model, TaskConfig())
    lesson = build_objective(ObjectiveInputs(units[HELD_OUT:], config, lm))
    if fault:
        plant(lesson, FAULTS[fault], len(lesson.units) // ROWS // 2)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(lm, lesson, config, seed, Path(scratch))
        steps = trainer.train()
    return {
        "loss": held_out_loss(lm, units[:HELD_OUT], config),
        "steps": len(steps),
        "decisions": [one["action"] for one in trainer.state.watch.report()],
    }


def main() -> None:
    """Train again and again and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    lm = load_language_model(arguments.model, TaskConfig())
    with open(arguments.data, encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(HELD_OUT + ROWS * arguments.steps)]
    units: list[Unit] = [[lm.encode([{"role": "user", "content": row["question"]}], row["answer"])] for row in rows]
    config = TrainConfig.read(
        {
            "epochs": 1, "batch_size": ROWS, "learning_rate": 2e-5, "micro_batch_tokens": TOKENS,
            "checkpoint": {"every_seconds": None, "every_steps": 5},
        },
        "benchmark",
    )  # fmt: skip
    print("| training | seed | steps | decisions | final loss | distance from the clean mean |")
    print("| --- | ---: | ---: | --- | ---: | ---: |")
    clean = []
    runs = [("clean", seed, None) for seed in range(arguments.seeds)] + [(fault, 0, fault) for fault in FAULTS]
    for name, seed, fault in runs:
        found = train(arguments.model, units, config, seed, fault)
        if fault is None:
            clean.append(found["loss"])
        mean = sum(clean) / len(clean)
        away = f"{found['loss'] - mean:+.4f}" if fault else ""
        decisions = ", ".join(found["decisions"]) or "none"
        print(f"| {name} | {seed} | {found['steps']} | {decisions} | {found['loss']:.4f} | {away} |", flush=True)
    print(f"the clean trainings lie {max(clean) - min(clean):.4f} apart")


if __name__ == "__main__":
    main()
