"""Train a model: a folder and labelled records in, a model in Hugging Face layout out."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from posttrain.models.language_model import LanguageModel, save_language_model
from posttrain.models.sources import check_model_folder
from posttrain.models.task import TaskConfig
from posttrain.train.config import TrainConfig, check_from_scratch
from posttrain.train.data.batch_sampler import mix_counts
from posttrain.train.initialization.initialize import model_from_config
from posttrain.train.lora import add_adapter, merge_adapter
from posttrain.train.memory.token_budget import resolve_token_budget
from posttrain.train.monitor.decisions import finite
from posttrain.train.monitor.metrics import Sink, StepValues, mean_loss
from posttrain.train.objectives.build import ObjectiveInputs, build_objective, load_model
from posttrain.train.trainer import Trainer
from posttrain.train.training_set import read_training_set

log = logging.getLogger("posttrain")

VERSION = 5

_TIMES = ("seconds", "tokens_per_second", "memory_bytes", "data_wait", "mfu", "phases")


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
    profile: Path | None = None,
    difficulties: np.ndarray | None = None,
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
        profile: where a profile is written, where the config asks for one.
        difficulties: float [records], a higher one is harder, in place of the column that the curriculum names.

    Returns:
        Counts and losses, the same for the same input: ``examples``, ``cut`` (how many were longer than
        ``max_length``), ``cut_records`` (their ids), ``steps``, ``tokens``, ``count_supervised``, ``first_loss``,
        ``last_loss`` (mean of the last epoch; both None where there is no finite number), ``decisions`` (what was found
        wrong and done about it); from scratch also ``initialization`` (variance of activations and gradients by layer
        before the first step); where stages or a curriculum left records out, ``never_met`` (their ids); where
        ``train.weight`` is 0 for some, which are not trained on, ``weightless`` (their ids); with a mix
        ``mixes``, how often each kind and record was met, as `posttrain.train.data.batch_sampler.mix_counts` gives it.

    Raises:
        UserError: if there is nothing to train on, or a record cannot be used.
        WorkError: if training went wrong beyond mending.
    """
    from_scratch = config.initialization.method != "none"
    check_model_folder(source, weights=not from_scratch)
    if from_scratch:
        check_from_scratch(config)
    config = config.with_teacher_from(Path())
    found = read_training_set(str(source), records, config, task, scratch, difficulties)
    units = found.units
    torch.manual_seed(seed)
    lm = _load_model(config, source, task, seed)
    if units.cut:
        log.warning("  cut to train.max_length: %d of %d records", len(units.cut), len(units))
    lesson = build_objective(
        ObjectiveInputs(units, config, lm, units.targets.tolist(), units.margins.tolist(), found.weights)
    )
    if lesson.has_teacher:
        del lm
        lesson.cache_teacher_outputs(scratch)
        lm = _load_model(config, source, task, seed)
    if config.method == "lora":
        lm = add_adapter(lm, config.lora)
    times = len(lesson.units) // len(units)  # kto takes the answers of a pair for themselves
    trainer = Trainer(
        lm,
        lesson,
        resolve_token_budget(config, lm, int(units.longest.max()), scratch),
        seed,
        scratch,
        sink,
        kinds={name: np.repeat(of, times).tolist() for name, of in found.kinds.items()},
        difficulties=None if found.difficulties is None else np.repeat(found.difficulties, times),
        profile=profile,
    )
    steps = trainer.fit()
    if config.method == "lora":
        lm = merge_adapter(lm, out / "adapter")
    save_language_model(lm, out)
    (out / "training.json").write_text(
        json.dumps([_deterministic_fields(step) for step in steps], indent=0), encoding="utf-8"
    )
    fresh: dict[str, Any] = {"initialization": trainer.initial} if trainer.initial else {}
    seen = trainer.state.sampler.seen().reshape(len(units), times).sum(1)
    if never_met := [units.record_ids[row] for row in np.flatnonzero(seen == 0)]:
        log.warning("  never met: %d of %d records", len(never_met), len(units))
        fresh["never_met"] = never_met
    if found.weightless:
        log.warning("  left out for their weight of 0: %d records", len(found.weightless))
        fresh["weightless"] = found.weightless
    if mixes := mix_counts(trainer.state.sampler, trainer.kinds or {}):
        fresh["mixes"] = mixes
    return fresh | {
        "examples": len(units),
        "cut": len(units.cut),
        "cut_records": units.cut,
        "steps": len(steps),
        "tokens": sum(step.tokens for step in steps),
        "supervised_tokens": sum(step.supervised_tokens for step in steps),
        "first_loss": finite(steps[0].loss),
        "last_loss": mean_loss(step for step in steps if step.epoch == steps[-1].epoch),
        "decisions": trainer.monitor.report(),
    }


def _load_model(config: TrainConfig, source: Path, task: TaskConfig, seed: int) -> LanguageModel:
    if config.initialization.method != "none":
        return model_from_config(source, task, config.initialization, seed, config.dtype)
    return load_model(config, source, task, config.dtype)


def _deterministic_fields(step: StepValues) -> dict[str, Any]:
    """What is the same whenever the training is done."""
    return {name: value for name, value in step.to_json().items() if name not in _TIMES}
