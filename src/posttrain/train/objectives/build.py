"""Builds an objective and loads the model that it trains."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from posttrain.models.chat import TokenizedExample
from posttrain.models.classifier import REWARD, load_classifier
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.packing import Unit
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.data.config import Shape
from posttrain.train.data.units import answer_start, split_units
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.distillation_objectives import HiddenDistillation, LogitDistillation
from posttrain.train.objectives.kto_objective import KtoObjective
from posttrain.train.objectives.log_probs import SftObjective
from posttrain.train.objectives.pair_objectives import (
    OrpoObjective,
    ReferenceFreeObjective,
    ReferencePairObjective,
    supervise_whole_chosen,
)
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.objectives.whole_text_objectives import ClassificationObjective, RewardObjective


@dataclass(frozen=True)
class ObjectiveInputs:
    """What a lesson is made of.

    Args:
        units: in the records' order, in the shape that `shape_of` names.
        config: the training's.
        lm: the model that `load_model` loaded, to look at; no lesson keeps it.
        targets: the class of each record, or whether its answer is desirable.
        margins: how much better each chosen answer is.
        weights: float64 [units], above 0, what each unit counts in the loss; None: 1 each.
    """

    units: Sequence[Unit]
    config: TrainConfig
    lm: LanguageModel
    targets: Sequence[int] = ()
    margins: Sequence[float] = ()
    weights: np.ndarray | None = None


def record_shape(config: TrainConfig, records: pa.Table) -> Shape:
    """The shape in which the objective wants the records."""
    shape = OBJECTIVES[config.objective].shape
    if shape == "labelled" and records["rejected"].null_count < records.num_rows:
        return "pair"  # each is a desirable and an undesirable answer, as TRL takes them
    return shape


def supervised_unit(config: TrainConfig, unit: Unit) -> Unit:
    """A record's unit as the objective learns from it: supervised is what a loss of tokens is taken on.

    Of a text that is read for one result, a reward or a class, no token is.
    """
    if OBJECTIVES[config.objective].output in ("reward", "classes"):
        texts = [text.ids[: answer_start(text)] if len(unit) == 1 else text.ids for text in unit]
        return [TokenizedExample(ids, [False] * len(ids)) for ids in texts]
    if config.objective == "orpo" and config.orpo.likelihood == "text":
        return supervise_whole_chosen(unit)
    return unit


def load_model(config: TrainConfig, source: Path, task: TaskConfig, dtype: str) -> LanguageModel:
    """Load the model with the head that the objective trains.

    Raises:
        UserError: it cannot be, or the task names no labels to tell apart.
    """
    output = OBJECTIVES[config.objective].output
    if output == "reward":
        return load_classifier(source, task, dtype, REWARD)
    if output == "classes":
        if not task.label_set:
            raise UserError("a classifier needs the closed set of its labels", where="task.labels", fix="name them")
        return load_classifier(source, task, dtype, task.label_set)
    return load_language_model(source, task, dtype)


def build_objective(given: ObjectiveInputs) -> Objective:
    """The lesson of the config's objective."""
    lesson = _BUILDERS[given.config.objective](given)
    lesson.weights = None if given.weights is None else torch.from_numpy(given.weights.astype(np.float64))
    return lesson


def _unpaired(given: ObjectiveInputs) -> Objective:
    if len(given.units[0]) == 1:
        return KtoObjective(given.units, given.config, [target == 1 for target in given.targets])
    return KtoObjective(split_units(given.units), given.config, [True, False] * len(given.units))


def _supervised(given: ObjectiveInputs) -> Objective:
    return SftObjective(given.units, given.config)


def _against_reference(given: ObjectiveInputs) -> Objective:
    return ReferencePairObjective(given.units, given.config)


def _reference_free(given: ObjectiveInputs) -> Objective:
    return ReferenceFreeObjective(given.units, given.config)


_BUILDERS: dict[str, Callable[[ObjectiveInputs], Objective]] = {
    "sft": _supervised,
    "dpo": _against_reference,
    "cdpo": _against_reference,
    "robust_dpo": _against_reference,
    "ipo": _against_reference,
    "hinge": _against_reference,
    "orpo": lambda given: OrpoObjective(given.units, given.config),
    "simpo": _reference_free,
    "cpo": _reference_free,
    "kto": _unpaired,
    "reward": lambda given: RewardObjective(given.units, given.config, given.lm, given.margins),
    "classification": lambda given: ClassificationObjective(given.units, given.config, given.lm, given.targets),
    "distill": lambda given: LogitDistillation(given.units, given.config, given.lm),
    "distill_hidden": lambda given: HiddenDistillation(given.units, given.config, given.lm),
}
