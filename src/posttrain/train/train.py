"""The training stage: a model folder and labelled records in, a candidate in Hugging Face layout out."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from posttrain.models.language_model import load, save
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.examples import encode
from posttrain.train.lora import adapt, fold
from posttrain.train.trainer import fit

log = logging.getLogger("posttrain")

VERSION = 1

# Up to this length plain matrix products beat the fused kernel's backward pass on a CPU.
_SHORT = 256


def train(
    source: Path, records: pa.Table, config: TrainConfig, task: TaskConfig, *, seed: int, out: Path, scratch: Path
) -> dict[str, Any]:
    """Train a model on labelled records.

    Args:
        source: the folder of the model to start from.
        records: rows of the record schema; rows without an answer or a text are an error.
        config: how to train.
        task: what the model is asked to do.
        seed: of the order of the data, dropout and fresh adapters.
        out: where the trained model and ``training.json`` (one entry an optimiser step) are written.
        scratch: where checkpoints lie until the training is done; a killed training goes on from there.

    Returns:
        Counts and losses, the same for the same input: ``examples``, ``cut`` (how many were longer than
        ``max_length``), ``cut_records`` (their ids), ``steps``, ``tokens``, ``supervised_tokens``, ``first_loss``,
        ``last_loss`` (mean of the last epoch).

    Raises:
        UserError: if there is nothing to train on, or a record cannot be used.
    """
    if records.num_rows == 0:
        raise UserError("there is no labelled record to train on")
    torch.manual_seed(seed)
    lm = load(source, task, "bfloat16" if config.precision == "bfloat16" else "float32")
    examples, cut = encode(lm, records, config.max_length)
    if lm.device.type == "cpu" and max(len(example.ids) for example in examples) <= _SHORT:
        lm.model.set_attn_implementation("eager")
    if config.method == "lora":
        lm = adapt(lm, config.lora)
    if cut:
        log.warning("  cut to train.max_length: %d of %d records", len(cut), len(examples))
    steps = fit(lm, examples, config, seed, scratch)
    if config.method == "lora":
        lm = fold(lm, out / "adapter")
    save(lm, out)
    (out / "training.json").write_text(json.dumps([asdict(step) for step in steps], indent=0), encoding="utf-8")
    last = [step for step in steps if step.epoch == config.epochs - 1]
    return {
        "examples": len(examples),
        "cut": len(cut),
        "cut_records": cut,
        "steps": len(steps),
        "tokens": sum(step.tokens for step in steps),
        "supervised_tokens": sum(step.supervised_tokens for step in steps),
        "first_loss": steps[0].loss,
        "last_loss": sum(s.loss * s.supervised_tokens for s in last) / sum(s.supervised_tokens for s in last),
    }
