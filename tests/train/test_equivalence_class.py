"""Variants of one training: all follow one canonical float32 trajectory and end with the same weights.

The canonical one is plain PyTorch and transformers: each example alone, torch's clipping and AdamW. Loss and gradient
norm of every step are compared, by the largest residual and by the mean signed residual, which detects a drift.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.models import packing
from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Unit, micro_batches
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.base import ObjectiveInputs
from posttrain.train.objectives.build import build_objective
from posttrain.train.optim.schedule import scheduled_lr
from posttrain.train.trainer import Trainer

pytestmark = pytest.mark.slow

Fresh = Callable[..., LanguageModel]
STEPS = 8


@dataclass(frozen=True)
class Variant:
    """A variant of the training.

    Args:
        micro_batches: number of micro-batches in a step of eight units.
        changes: to the config.
        padded: pad the rows, as for a model whose attention cannot be confined.
        killed: kill the process after every step, and restart it.
        precision: of the model's computation.
        tolerance: of the largest residual; a fifth of it for the mean one.
    """

    micro_batches: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    padded: bool = False
    killed: bool = False
    precision: str = "float32"
    tolerance: float = 5e-6


# Each variant with one of the two objectives.
VARIANTS: dict[tuple[str, str], Variant] = {
    ("sft", "packed"): Variant(),
    ("sft", "padded"): Variant(padded=True),
    ("sft", "accumulated, 4 x 2"): Variant(4),
    ("sft", "recomputed"): Variant(changes={"recompute": "full"}),
    ("sft", "with much prefetch"): Variant(2, {"loader": {"workers": 3, "prefetch": 5}}),
    ("sft", "resumed at every step, 4 x 2"): Variant(4, killed=True),
    ("dpo", "accumulated, 8 x 1"): Variant(8),
    ("dpo", "accumulated, 4 x 2, padded"): Variant(4, padded=True),
    ("dpo", "recomputed in part"): Variant(changes={"recompute": "50%"}),
    ("dpo", "without prefetch"): Variant(2, {"loader": {"workers": 0}}),
    ("dpo", "resumed at every step"): Variant(killed=True),
}
COMPILED = Variant(2, {"compile": True}, tolerance=1e-4)  # takes half a minute, so there is only one

PROMPTS = [f"{word} number {number:02d} of my accounts"[:26] for number in range(8) for word in ("card", "the money")]
ANSWERS = [("lost", "stolen"), ("refund", "topup"), ("gone", "found")]


def units_of(lm: LanguageModel, objective: str) -> list[Unit]:
    """Sixteen units of similar length, so that one token budget splits every eight of them equally."""
    result = []
    for number, prompt in enumerate(PROMPTS):
        answers = ANSWERS[number % len(ANSWERS)]
        sequences = [lm.encode([{"role": "user", "content": prompt}], answer) for answer in answers]
        result.append(sequences if objective == "dpo" else sequences[:1])
    return result


def config_of(objective: str, variant: Variant, units: Sequence[Unit]) -> TrainConfig:
    longest = max(sum(len(sequence.ids) for sequence in unit) for unit in units)
    budget = longest * 8 // variant.micro_batches
    cut = [len(part) for part in micro_batches(units[:8], budget)]
    assert cut == [8 // variant.micro_batches] * variant.micro_batches
    return TrainConfig.read(
        {
            "objective": objective,
            "epochs": 4,
            "batch_size": 8,
            "learning_rate": 3e-3,
            "precision": variant.precision,
            "micro_batch_tokens": budget,
            "checkpoint": {"every_seconds": None, "every_steps": 1 if variant.killed else None, "background": False},
            "schedule": {"name": "cosine", "warmup": 0.3},
            **variant.changes,
        },
        "train",
    )


def log_probability(lm: LanguageModel, sequence: TokenizedExample) -> Tensor:
    """The log-probability of all supervised tokens, by transformers' own forward."""
    ids = torch.tensor([sequence.ids])
    log_probs = lm.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    result = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    return result[torch.tensor(sequence.supervised[1:])].sum()


def unit_loss(lm: LanguageModel, start: LanguageModel, unit: Unit, config: TrainConfig) -> tuple[Tensor, int]:
    """The loss and its count: tokens, or one pair (Rafailov et al. 2023, arXiv:2305.18290, equation 7)."""
    if config.objective.name == "sft":
        (sequence,) = unit
        return -log_probability(lm, sequence), sum(sequence.supervised[1:])
    with torch.no_grad():
        reference = [log_probability(start, sequence) for sequence in unit]
    chosen, rejected = (log_probability(lm, sequence) - ref for sequence, ref in zip(unit, reference, strict=True))
    return -torch.nn.functional.logsigmoid(config.objective.beta * (chosen - rejected)), 1


@dataclass(frozen=True)
class Trajectory:
    """Loss and gradient norm [steps, 2] of every step, and the weights at the end."""

    values: np.ndarray
    weights: dict[str, Tensor]


def reference_trajectory(lm: LanguageModel, units: Sequence[Unit], config: TrainConfig, seed: int) -> Trajectory:
    start = copy.deepcopy(lm)
    decayed = [weight for name, weight in lm.model.named_parameters() if name.endswith("proj.weight")]
    others = [weight for name, weight in lm.model.named_parameters() if not name.endswith("proj.weight")]
    groups = [
        {"params": decayed, "weight_decay": config.optimizer.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas)
    permutations = [np.random.default_rng([seed, epoch]).permutation(len(units)) for epoch in range(config.epochs)]
    size = config.batch_size
    batches = [rows[start : start + size] for rows in permutations for start in range(0, len(units), size)]
    values = []
    for step, rows in enumerate(batches):
        losses = [unit_loss(lm, start, units[row], config) for row in rows]
        mean = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(lm.model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = scheduled_lr(config.schedule, config.learning_rate, step, len(batches))
        optimizer.step()
        optimizer.zero_grad()
        values.append((mean.item(), float(norm)))
    return Trajectory(np.array(values), {name: entry.detach() for name, entry in lm.model.named_parameters()})


class Killed(BaseException):
    """Stands for the death of the process."""


def train(fresh: Fresh, units: Sequence[Unit], config: TrainConfig, variant: Variant, scratch: Path) -> Trajectory:
    """Runs a variant of the training."""
    while True:
        lm = fresh("bfloat16" if variant.precision == "bfloat16" else "float32")
        torch.manual_seed(99)  # a new process has other generator states
        with pytest.MonkeyPatch.context() as patch:
            if variant.padded:
                patch.setattr(packing, "has_full_attention", lambda lm, tokens: False)
            if variant.killed:
                _die_after_a_checkpoint(patch)
            trainer = Trainer(lm, build_objective(ObjectiveInputs(units, config, lm)), config, 7, scratch)
            try:
                steps = trainer.train()
            except Killed:
                continue
        assert trainer.parts.batches._padded == variant.padded
        return Trajectory(
            np.array([(step.loss, step.grad_norm) for step in steps]),
            {name: item.detach() for name, item in lm.model.named_parameters()},
        )


def _die_after_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    save = Checkpoints.save

    def die(self: Checkpoints, *arguments: Any, **options: Any) -> bool:
        save(self, *arguments, **options)
        raise Killed

    patch.setattr(Checkpoints, "save", die)


@pytest.fixture(scope="module")
def trajectories() -> dict[str, Trajectory]:
    """The canonical trajectory by objective, filled on demand."""
    return {}


@pytest.mark.parametrize(("objective", "name"), VARIANTS)
def test_a_variant_follows_the_canonical_trajectory(
    fresh: Fresh, trajectories: dict[str, Trajectory], tmp_path: Path, objective: str, name: str
) -> None:
    variant = VARIANTS[objective, name]
    assert max_residual(fresh, trajectories, tmp_path, objective, variant) < variant.tolerance


@pytest.mark.long
def test_a_compiled_training_follows_the_canonical_trajectory(
    fresh: Fresh, trajectories: dict[str, Trajectory], tmp_path: Path
) -> None:
    # Layouts differ from row to row; a layer that is compiled again for each ends up not compiled at all.
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert max_residual(fresh, trajectories, tmp_path, "sft", COMPILED) < COMPILED.tolerance


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_low_precision_stays_near_the_canonical_trajectory(
    fresh: Fresh, trajectories: dict[str, Trajectory], tmp_path: Path, precision: str
) -> None:
    variant = Variant(2, precision=precision, tolerance=0.12)
    assert 1e-5 < max_residual(fresh, trajectories, tmp_path, "sft", variant) < variant.tolerance, (
        "it is low precision, and near"
    )


def max_residual(
    fresh: Fresh, trajectories: dict[str, Trajectory], scratch: Path, objective: str, variant: Variant
) -> float:
    """Runs a variant; returns the largest relative residual of its losses and norms."""
    units = units_of(fresh(), objective)
    config = config_of(objective, variant, units)
    if objective not in trajectories:
        trajectories[objective] = reference_trajectory(fresh(), units, config, seed=7)
    expected = trajectories[objective]
    actual = train(fresh, units, config, variant, scratch)
    assert actual.values.shape == expected.values.shape == (STEPS, 2)
    assert expected.values[0, 1] > config.clip, "the first step is clipped"
    assert expected.values[-1, 0] < 0.7 * expected.values[0, 0], "something is learned"
    residuals = actual.values / expected.values - 1
    assert np.abs(residuals.mean(axis=0)).max() < variant.tolerance / 5, "it drifts to one side"
    if variant.precision == "float32":
        for name, weight in expected.weights.items():
            torch.testing.assert_close(actual.weights[name], weight, atol=2e-4, rtol=0, msg=name)
    return float(np.abs(residuals).max())
