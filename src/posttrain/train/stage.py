"""Train a model: a folder and labelled records in, a model in Hugging Face layout out."""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from posttrain.models.language_model import load, save
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.examples import encode
from posttrain.train.lesson import Lesson
from posttrain.train.lora import adapt, fold
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.trainer import Trainer
from posttrain.train.watch.sinks.base import Sink
from posttrain.train.watch.values import StepValues

log = logging.getLogger("posttrain")

VERSION = 2

_TIMES = ("seconds", "tokens_per_second", "memory_bytes", "data_wait", "mfu")


def train(
    source: Path,
    records: pa.Table,
    config: TrainConfig,
    task: TaskConfig,
    *,
    seed: int,
    out: Path,
    scratch: Path,
    sink: Sink | None = None,
) -> dict[str, Any]:
    """Train a model on labelled records.

    Args:
        source: the folder of the model to start from.
        records: rows of the record schema; rows without an answer or a text are an error.
        config: how to train.
        task: what the model is asked to do.
        seed: of the order of the data, dropout and fresh adapters.
        out: where the trained model and ``training.json`` (one entry an optimiser step, without times) are written.
        scratch: where checkpoints lie until the training is done; a killed training goes on from there.
        sink: what is told of every step.

    Returns:
        Counts and losses, the same for the same input: ``examples``, ``cut`` (how many were longer than
        ``max_length``), ``cut_records`` (their ids), ``steps``, ``tokens``, ``supervised_tokens``, ``first_loss``,
        ``last_loss`` (mean of the last epoch), ``decisions`` (what was found wrong and done about it).

    Raises:
        UserError: if there is nothing to train on, or a record cannot be used.
        WorkError: if training went wrong beyond mending.
    """
    if records.num_rows == 0:
        raise UserError("there is no labelled record to train on")
    torch.manual_seed(seed)
    lm = load(source, task, "bfloat16" if config.precision == "bfloat16" else "float32")
    units, cut = encode(lm, records, config.max_length, pairs=OBJECTIVES[config.objective].shape == "pair")
    if config.method == "lora":
        lm = adapt(lm, config.lora)
    if cut:
        log.warning("  cut to train.max_length: %d of %d records", len(cut), len(units))
    trainer = Trainer(lm, Lesson(units, config), config, seed, scratch, sink)
    steps = trainer.fit()
    if config.method == "lora":
        lm = fold(lm, out / "adapter")
    save(lm, out)
    (out / "training.json").write_text(json.dumps([_lasting(step) for step in steps], indent=0), encoding="utf-8")
    # The loss of a step that was left out may be no number; what was decided about it stands beside.
    last = [step for step in steps if step.epoch == config.epochs - 1 and math.isfinite(step.loss)]
    return {
        "examples": len(units),
        "cut": len(cut),
        "cut_records": cut,
        "steps": len(steps),
        "tokens": sum(step.tokens for step in steps),
        "supervised_tokens": sum(step.supervised_tokens for step in steps),
        "first_loss": steps[0].loss,
        "last_loss": _mean_loss(last),
        "decisions": trainer.watch.report(),
    }


def _lasting(step: StepValues) -> dict[str, Any]:
    """What is the same whenever the training is done."""
    return {name: value for name, value in step.to_json().items() if name not in _TIMES}


def _mean_loss(steps: Sequence[StepValues]) -> float:
    return sum(s.loss * s.supervised_tokens for s in steps) / max(1, sum(s.supervised_tokens for s in steps))
