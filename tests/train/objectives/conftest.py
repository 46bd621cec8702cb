"""Rows of everything that a formula may read, and objectives over the same few records."""

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from posttrain.data.records.schema import records as table
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import pack, packed_attention
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.train.config import TrainConfig
from posttrain.train.data.encoding import build_examples
from posttrain.train.objectives.base import Objective, ObjectiveInputs
from posttrain.train.objectives.build import build_objective, load_model, record_shape
from posttrain.train.objectives.loss import mean_metrics, merge_metrics
from posttrain.train.objectives.registry import OBJECTIVES

VOCABULARY, WIDTH, TEACHER_WIDTH = 7, 5, 6


def rows(seed: int, n: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> dict[str, Tensor]:
    """N rows; ``scale`` is how far log-probabilities, logits and hidden states are from 0."""
    rng = np.random.default_rng(seed)
    made: dict[str, Tensor] = {}
    for name in ("chosen", "rejected", "reference_chosen", "reference_rejected"):
        counts = rng.integers(1, 9, n)
        made[f"{name}_counts"] = torch.from_numpy(counts)
        made[name] = torch.from_numpy(-counts * rng.uniform(0.05, 3, n) * scale).to(dtype)
    made["margin"] = torch.from_numpy(rng.uniform(0, 1, n)).to(dtype)
    made["desirable"] = torch.from_numpy(rng.random(n) < 0.5)
    made["targets"] = torch.from_numpy(rng.integers(0, VOCABULARY, n))
    for name, width in (("student", VOCABULARY), ("teacher", VOCABULARY), ("hidden", WIDTH)):
        made[name] = torch.from_numpy(rng.normal(0, 2 * scale, (n, width))).to(dtype)
    made["teacher_hidden"] = torch.from_numpy(rng.normal(0, scale, (n, TEACHER_WIDTH))).to(dtype)
    return made


@pytest.fixture(scope="session")
def make() -> Callable[..., dict[str, Tensor]]:
    return rows


LABELS = ["card", "refund", "top up"]
ASKED = [
    ("my card is gone", "card", "refund"),
    ("where is my money", "refund", "no"),
    ("i was charged twice for the same thing", "refund", "card lost"),
    ("how do i top up", "top up", "x"),
    ("somebody took my card on the train", "card", "top"),
    ("top", "top up", "card card"),
    ("two weeks and no money", "refund", "who knows"),
    ("it is lost", "card", "good for you"),
]
TASK = TaskConfig(system="Name it.", labels=LABELS)

Parts = Sequence[Sequence[int]]
Gradients = dict[str, torch.Tensor]


def records_of(shape: str) -> pa.Table:
    """Eight records in the shape that an objective takes."""
    rows = []
    for line, (asked, good, bad) in enumerate(ASKED, 1):
        desirable = line % 3 != 0
        meta = {"label": desirable} if shape == "labelled" else {"margin": line / 8} if shape == "pair" else {}
        rows.append(
            {
                "id": f"{line:020x}",
                "input_id": f"{line:020x}",
                "prompt": [{"role": "user", "content": asked}],
                "completion": good if shape != "labelled" or desirable else bad,
                "rejected": bad if shape == "pair" else None,
                "text": None,
                "group": None,
                "source": "f",
                "line": line,
                "meta": json.dumps(meta),
            }
        )
    return table(rows)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher: another tiny model, wider and deeper, with the same tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("teacher"), seed=5, width=128, layers=3)


class Class:
    """A model with a lesson; ``gradients(parts)`` is what a step over all units gives when it is cut so."""

    def __init__(self, lm: LanguageModel, lesson: Objective) -> None:
        self.lm, self.lesson = lm, lesson

    def loss(self, parts: Parts) -> tuple[float, dict[str, float]]:
        """The step's mean, its gradient left in the model, and the metrics' means."""
        whole, total, metrics = self.lesson.begin_step(self.lm, parts), 0.0, []
        for rows in parts:
            loss = self.lesson.loss(self.lm, pack([self.lesson.units[row] for row in rows]), rows)
            (loss.sum / whole).backward()
            total += loss.sum.item()
            metrics.append(loss.metrics)
        return total / whole, mean_metrics(merge_metrics(metrics))

    def gradients(self, parts: Parts) -> tuple[float, Gradients, dict[str, float]]:
        self.lm.model.zero_grad()
        loss, metrics = self.loss(parts)
        weights = self.lm.model.named_parameters()
        found = {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}
        self.lm.model.zero_grad()
        return loss, found, metrics


@pytest.fixture
def school(tiny_model: Path, other_model: Path, tmp_path: Path) -> Any:
    """``school(objective, settings)``: a lesson, prepared, and its model, which has moved on a little since then."""
    with ExitStack() as stack:

        def open_class(objective: str, settings: dict[str, Any] | None = None, **more: Any) -> Class:
            base = {"objective": objective, "precision": "float32", "batch_size": 8, "micro_batch_tokens": 200}
            values: dict[str, Any] = base | copy.deepcopy(settings or {})
            if objective.startswith("distill"):
                values.setdefault("distill", {}).setdefault("teacher", str(more.get("teacher", other_model)))
            config = TrainConfig.read(values, "test")
            torch.manual_seed(0)
            lm = load_model(config, tiny_model, TASK, "float32")
            records = more.get("records") or records_of(OBJECTIVES[objective].shape)
            shape = record_shape(config, records)
            found = build_examples(lm, records, config.max_length, shape)
            lesson = build_objective(
                ObjectiveInputs(
                    [one.unit for one in found], config, lm, [e.target for e in found], [e.margin for e in found]
                )
            )
            lesson.cache_teacher_outputs(tmp_path)
            stack.enter_context(lesson.attach_modules(lm))
            longest = max(len(sequence.ids) for unit in lesson.units for sequence in unit)
            assert stack.enter_context(packed_attention(lm, longest))
            lesson.prepare(lm, tmp_path, padded=False)
            if more.get("moved", True):
                move(lm)
            return Class(lm, lesson)

        yield open_class


@pytest.fixture
def shaped() -> Callable[[str], pa.Table]:
    """``shaped("pair")``: eight records in that shape."""
    return records_of


@torch.no_grad()
def move(lm: LanguageModel) -> None:
    """Away from the reference, so that it matters."""
    for weight in lm.model.parameters():
        weight += 0.02 * torch.randn_like(weight)
