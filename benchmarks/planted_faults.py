"""Plants faults in a training, and compares its final loss with that of clean trainings.

    python benchmarks/planted_faults.py --model DIR --data gsm8k_train.jsonl [--steps 40] [--seeds 3]

The training is full fine-tuning of SmolLM2-135M on GSM8K's questions and answers in bfloat16, 4 examples a step. The
clean training runs once for each seed, which shuffles the data: the spread of their final losses is the noise. Then
each fault is planted in the middle of the first seed's training: a batch whose loss is NaN, a gradient 100 times too
large, and an allocation that fails. The final loss is that of 64 examples that no training sees.
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

BATCH_SIZE = 4
HELD_OUT_EXAMPLES = 64
MICRO_BATCH_TOKENS = 2048


def scale_loss(factor: float) -> Callable[[Loss], Loss]:
    """Return a fault that multiplies the loss, and so its gradient."""
    return lambda loss: Loss(loss.sum * factor, loss.count, loss.metrics)


def out_of_memory(loss: Loss) -> Loss:
    """Raise the error that torch raises when an allocation fails."""
    raise torch.OutOfMemoryError("planted: out of memory")


FAULTS: dict[str, Callable[[Loss], Loss]] = {
    "a NaN batch": scale_loss(float("nan")),
    "a 100 times larger gradient": scale_loss(100.0),
    "out of memory": out_of_memory,
}


def plant_fault(objective: Objective, fault: Callable[[Loss], Loss], step: int) -> None:
    """Apply the fault to the first loss of a step, once: a repeated step is clean."""
    loss, begin_step, steps_left = objective.loss, objective.begin_step, step + 1

    def begin_step_with_countdown(lm: LanguageModel, groups: Any) -> float:
        nonlocal steps_left
        steps_left -= 1
        return begin_step(lm, groups)

    def loss_with_fault(lm: LanguageModel, packed: Any, rows: Any) -> Loss:
        nonlocal steps_left
        clean_loss = loss(lm, packed, rows)
        if steps_left == 0:
            steps_left = -1
            return fault(clean_loss)
        return clean_loss

    objective.begin_step, objective.loss = begin_step_with_countdown, loss_with_fault  # type: ignore[method-assign]


@torch.no_grad()
def held_out_loss(lm: LanguageModel, units: list[Unit], config: TrainConfig) -> float:
    """Compute the mean loss, in nats a supervised token."""
    objective, loss_sum, count = build_objective(ObjectiveInputs(units, config, lm)), 0.0, 0.0
    first_row = 0
    with packed_attention(lm, max(len(sequence.ids) for unit in units for sequence in unit)) as is_packed:
        for group in micro_batches(units, MICRO_BATCH_TOKENS):
            rows = list(range(first_row, first_row := first_row + len(group)))
            loss = objective.loss(lm, pack(group, lm.device, padded=not is_packed), rows)
            loss_sum, count = loss_sum + loss.sum.item(), count + loss.count
    return loss_sum / count


def train(model: Path, units: list[Unit], config: TrainConfig, seed: int, fault: str | None) -> dict[str, Any]:
    """Train once; return the final loss, the number of steps and the monitor's decisions."""
    lm = load_language_model(model, TaskConfig())
    objective = build_objective(ObjectiveInputs(units[HELD_OUT_EXAMPLES:], config, lm))
    if fault:
        plant_fault(objective, FAULTS[fault], len(objective.units) // BATCH_SIZE // 2)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(lm, objective, config, seed, Path(scratch))
        steps = trainer.train()
    return {
        "loss": held_out_loss(lm, units[:HELD_OUT_EXAMPLES], config),
        "steps": len(steps),
        "decisions": [decision["action"] for decision in trainer.state.monitor.report()],
    }


def main() -> None:
    """Run all trainings and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    lm = load_language_model(arguments.model, TaskConfig())
    with open(arguments.data, encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(HELD_OUT_EXAMPLES + BATCH_SIZE * arguments.steps)]
    units: list[Unit] = [[lm.encode([{"role": "user", "content": row["question"]}], row["answer"])] for row in rows]
    config = TrainConfig.read(
        {
            "epochs": 1, "batch_size": BATCH_SIZE, "learning_rate": 2e-5, "micro_batch_tokens": MICRO_BATCH_TOKENS,
            "checkpoint": {"every_seconds": None, "every_steps": 5},
        },
        "benchmark",
    )  # fmt: skip
    print("| training | seed | steps | decisions | final loss | distance from the clean mean |")
    print("| --- | ---: | ---: | --- | ---: | ---: |")
    clean_losses = []
    runs = [("clean", seed, None) for seed in range(arguments.seeds)] + [(fault, 0, fault) for fault in FAULTS]
    for label, seed, fault in runs:
        result = train(arguments.model, units, config, seed, fault)
        if fault is None:
            clean_losses.append(result["loss"])
        mean = sum(clean_losses) / len(clean_losses)
        distance = f"{result['loss'] - mean:+.4f}" if fault else ""
        decisions = ", ".join(result["decisions"]) or "none"
        print(f"| {label} | {seed} | {result['steps']} | {decisions} | {result['loss']:.4f} | {distance} |", flush=True)
    print(f"the clean trainings lie {max(clean_losses) - min(clean_losses):.4f} apart")


if __name__ == "__main__":
    main()
