"""Train a model: a folder and labelled records in, a model in Hugging Face layout out."""

import json
import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from posttrain.models.language_model import LanguageModel, save_language_model
from posttrain.models.loading import not_finite
from posttrain.models.precision import choose_precision, count_weights
from posttrain.models.sources import check_model_folder
from posttrain.models.task import TaskConfig
from posttrain.store.errors import WorkError
from posttrain.store.files import remove_tree
from posttrain.train.callbacks import CallbackList, TrainingStopped
from posttrain.train.config import TrainConfig
from posttrain.train.data.mix import mix_counts
from posttrain.train.evaluation import Evaluation, HeldOut
from posttrain.train.from_scratch import check_from_scratch, random_model
from posttrain.train.lora import add_adapter, check_ranks, merge_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.memory.estimate import count_step_tasks
from posttrain.train.memory.token_budget import resolve_token_budget
from posttrain.train.monitor.metrics import STEPS, Sink, StepValues, finite, mean_loss
from posttrain.train.objectives.base import ObjectiveInputs
from posttrain.train.objectives.build import build_objective, load_model
from posttrain.train.optim.config import SurgeryConfig
from posttrain.train.out_of_memory import memory_advice
from posttrain.train.pruning import pruned_base, pruning_report
from posttrain.train.rank_gates import RankGates, cut_adapter, gate_ranks
from posttrain.train.shape import check_trained_shape
from posttrain.train.trainer import Trainer
from posttrain.train.training_set import TrainingSet, read_training_set

log = logging.getLogger("posttrain")


_TIMES = ("seconds", "tokens_per_second", "memory_bytes", "data_wait", "data_rate", "mfu", "phases")


@memory_advice()
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
    weights: np.ndarray | None = None,
    callbacks: CallbackList | None = None,
    held_out: HeldOut | None = None,
    keep_end: bool = False,
) -> dict[str, Any]:
    """Trains a model on labelled records.

    Args:
        source: the folder of the model to start from.
        records: rows of the record schema; rows without an answer or a text are an error.
        config: settings of the training.
        task: task of the model.
        seed: seed of the order of the data, dropout and fresh adapters.
        out: gets the trained model and ``training.json`` (one entry per optimiser step, without times).
        scratch: folder of the checkpoints, from which a killed training resumes.
        sink: receives the values of every step.
        profile: folder of a profile, if the config asks for one.
        difficulties: float [records], higher is harder, in place of the column that the curriculum names.
        weights: float [records], of the records in the loss, times the column that the config names.
        callbacks: called after each step and at each checkpoint.
        held_out: what the model is evaluated on while it trains; None: it is not evaluated.
        keep_end: whether the state after the last step is saved in ``scratch``.

    Returns:
        Counts and losses, the same for the same input: ``examples``, ``cut`` (number of those longer than
        ``max_length``), ``cut_records`` (their ids), ``steps``, ``skipped_steps`` (those whose gradient was left out:
        float16 overflowed, or the monitor decided so), ``tokens``, ``supervised_tokens``, ``first_loss``,
        ``last_loss`` (mean of the last epoch; both None if not finite), ``decisions`` (of the monitor); with pruning
        ``pruning`` (`posttrain.train.pruning.pruning_report`); ids of records in ``never_met`` (phases or a curriculum
        left them out), ``weightless`` (of weight 0), ``too_long`` (`train.too_long` left them out) and ``identical``
        (pairs of two equal answers); with a mix ``mixes`` (uses of each kind, as in
        `posttrain.train.data.mix.mix_counts`); with gates ``ranks`` (by module, as `train.lora.ranks`);
        ``evaluation`` (the values on held-out records of the weights that are the result, and after how many ``steps``
        they were).

    Raises:
        UserError: if there is nothing to train on, or a record cannot be used.
        WorkError: if training fails and cannot be recovered.
        TrainingStopped: a callback asked to stop; its checkpoint lies in ``scratch``.
    """
    config, named = _checked(source, config), str(source)
    if held_out is not None:
        held_out, kept = held_out.split(records, config.evaluate.data, seed)
        records = records.filter(pa.array(kept))
        difficulties, weights = (None if column is None else column[kept] for column in (difficulties, weights))
    data = read_training_set(named, records, config, task, scratch, difficulties, weights)
    units, columns = data.units, data.records
    if units.cut:
        log.warning("  cut to train.max_length: %d of %d records", len(units.cut), len(units))
    # Before the model is loaded: a head that the base model lacks is drawn at random.
    torch.manual_seed(seed)
    if config.prune.is_set:
        source = pruned_base(source, units, config, task, seed, scratch)
        torch.manual_seed(seed)  # again, as a resumed training finds the pruned model and draws nothing for it
    lm = _load_model(config, source, task, seed)
    margins = () if columns.margins is None else columns.margins.tolist()
    # No name for the inputs: they hold the model, whose memory a teacher gets.
    objective = build_objective(ObjectiveInputs(units, config, lm, units.targets.tolist(), margins, columns.weights))
    # Before a teacher takes the model's memory.
    evaluation = None if held_out is None else Evaluation.build(lm, named, held_out, config, task, scratch)
    if objective.has_teacher:
        del lm
        objective.cache_teacher_outputs(scratch)
        lm = _load_model(config, source, task, seed)
    if config.method == "lora":
        lm = add_adapter(lm, config.lora)
    units_per_record = len(objective.units) // len(units)
    trainer = Trainer(
        lm,
        objective,
        resolve_token_budget(config, lm, int(units.longest.max()), scratch, count_step_tasks(config, columns.kinds)),
        seed,
        scratch,
        sink,
        kinds={name: np.repeat(kinds, units_per_record).tolist() for name, kinds in columns.kinds.items()},
        difficulties=None if columns.difficulties is None else np.repeat(columns.difficulties, units_per_record),
        profile=profile,
        callbacks=callbacks or CallbackList(),
        evaluation=evaluation,
        keep_end=keep_end,
    )
    try:
        steps = trainer.train()
    except TrainingStopped:
        # Now, as the trainer has given the model back as it was loaded, without what it attaches for training.
        gates = _rank_gates(trainer)
        with gates.result() if gates else nullcontext():
            trainer.callbacks.on_stop(lm)
        raise
    summary = _summarise(trainer, data, steps)
    _check_trained(lm, steps, summary["skipped_steps"], config)
    if values := steps[trainer.result_steps - 1].evaluation:
        measured = {name: finite(value) for name, value in values.items()}
        summary["evaluation"] = {"steps": trainer.result_steps, **measured}
    if gates := _rank_gates(trainer):
        ranks = summary["ranks"] = gate_ranks(gates.by_module(), config.lora)
        lm = cut_adapter(lm, gates.by_module(), config.lora)
        modules = sum(rank > 0 for rank in ranks.values())
        log.info("  gates keep %d of %d ranks, in %d modules", sum(ranks.values()), len(gates.costs), modules)
    if config.method == "lora":
        lm = merge_adapter(lm, out / "adapter")
        if config.prune.is_set:
            remove_tree(out / "adapter")  # its base is not kept
    if config.prune.is_set and (report := pruning_report(source)):
        summary["pruning"] = report
    save_language_model(lm, out)
    (out / STEPS).write_text(json.dumps([_deterministic_fields(step) for step in steps], indent=0), encoding="utf-8")
    return summary


def _checked(source: Path, config: TrainConfig) -> TrainConfig:
    """Checks the settings against the model's files, names those without effect, and decides teacher and precision."""
    check_model_folder(source, weights=not config.from_scratch)
    if config.from_scratch:
        check_from_scratch(config)
    check_trained_shape(str(source), config)
    check_ranks(str(source), config)
    config = config.with_teacher_from(Path())
    if config.precision == "auto":
        config = config.with_precision(choose_precision(count_weights(source)))
    if config.method != "lora" and config.lora != LoraConfig():
        log.warning("  train.lora is set, and train.method is full: all weights are trained; set train.method to lora")
    if config.surgery.method == "none" and config.surgery != SurgeryConfig():
        log.warning("  train.surgery is set, and its method is none: all gradients are summed; name a method")
    return config


def _summarise(trainer: Trainer, data: TrainingSet, steps: Sequence[StepValues]) -> dict[str, Any]:
    """Returns counts and losses of a training, and logs what it left out."""
    units, sampler = data.units, trainer.state.sampler
    seen = sampler.seen(len(steps)).reshape(len(units), -1).sum(1)
    left_out = {
        "never_met": ("never met", [units.record_ids[row] for row in np.flatnonzero(seen == 0)]),
        "too_long": ("left out, longer than train.max_length", data.too_long),
        "weightless": ("left out for their weight of 0", data.weightless),
        "identical": ("left out, as both answers are the same", data.identical),
    }
    total = len(units) + len(data.too_long) + len(data.weightless) + len(data.identical)
    for message, ids in left_out.values():
        if ids:
            log.warning("  %s: %d of %d records", message, len(ids), total)
    optional: dict[str, Any] = {name: ids for name, (_, ids) in left_out.items()}
    optional["mixes"] = mix_counts(sampler, trainer.kinds or {}, len(steps))
    return {name: value for name, value in optional.items() if value} | {
        "examples": len(units),
        "cut": len(units.cut),
        "cut_records": units.cut,
        "steps": len(steps),
        "skipped_steps": sum(step.update_ratio is None for step in steps),
        "tokens": sum(step.tokens for step in steps),
        "supervised_tokens": sum(step.supervised_tokens for step in steps),
        "first_loss": finite(steps[0].loss),
        "last_loss": mean_loss(step for step in steps if step.epoch == steps[-1].epoch),
        "decisions": trainer.state.monitor.report(),
    }


def _rank_gates(trainer: Trainer) -> RankGates | None:
    return next((hook for hook in trainer.state.hooks if isinstance(hook, RankGates)), None)


def _load_model(config: TrainConfig, source: Path, task: TaskConfig, seed: int) -> LanguageModel:
    if config.from_scratch:
        return random_model(source, task, config, seed)
    return load_model(config, source, task, config.dtype)


def _check_trained(lm: LanguageModel, steps: Sequence[StepValues], skipped: int, config: TrainConfig) -> None:
    """Raises a WorkError unless the training left a model: finite weights that give finite losses, and were changed."""
    count = len(steps)
    if steps and skipped == count:
        if config.precision == "float16":
            raise WorkError(
                f"float16 gradients overflowed at every step: all {count} were skipped, and nothing was learned; "
                "train with train.precision=bfloat16, or for more steps"
            )
        raise WorkError(f"all {count} steps were skipped, and nothing was learned; the lines above say why")
    if steps and not any(math.isfinite(step.loss) for step in steps if step.epoch == steps[-1].epoch):
        raise WorkError(
            "no step of the last epoch had a finite loss, and no model is written; lower train.learning_rate"
        )
    # The loss of the last step is that of the weights before it: no detector has looked at the weights after it.
    if name := not_finite(lm.model):
        raise WorkError(
            f"training left NaN or infinite numbers in tensor {name}, and no model is written; "
            "lower train.learning_rate"
        )


def _deterministic_fields(step: StepValues) -> dict[str, Any]:
    """Returns the values that are the same in every run of the training."""
    return {name: value for name, value in step.to_json().items() if name not in _TIMES}
