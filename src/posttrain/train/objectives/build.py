"""Builds an objective and loads the model that it trains."""

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
from posttrain.store.extensions import load_object
from posttrain.train.data.config import RecordShape
from posttrain.train.data.units import answer_start
from posttrain.train.objectives.base import Objective, ObjectiveInputs, TrainArguments
from posttrain.train.objectives.registry import objective_spec


def objective_class(name: str) -> type[Objective]:
    """Imports the class of an objective.

    Raises:
        UserError: it cannot be imported, or is not an objective.
    """
    loaded = objective_spec(name).objective
    if isinstance(loaded, str):
        loaded = load_object(loaded, "train.objective")
    # Here and not in the registry, which loads no torch.
    if not (isinstance(loaded, type) and issubclass(loaded, Objective)):
        fix = "derive it from posttrain.train.objectives.base.Objective"
        raise UserError(f"`{name}` has no objective class", where="train.objective", fix=fix)
    return loaded


def build_objective(inputs: ObjectiveInputs) -> Objective:
    """Builds the config's objective."""
    objective = objective_class(inputs.config.objective.name).from_inputs(inputs)
    if inputs.weights is not None:
        objective.weights = torch.from_numpy(inputs.weights.astype(np.float64))
    return objective


def record_shape(config: TrainArguments, records: pa.Table) -> RecordShape:
    """Returns the shape in which the objective reads the records."""
    shape = objective_spec(config.objective.name).shape
    if shape == "labelled" and records["rejected"].null_count < records.num_rows:
        return "pair"  # a desirable and an undesirable answer each, as in TRL
    return shape


def supervised_unit(config: TrainArguments, unit: Unit) -> Unit:
    """Marks the tokens of a record's unit that the objective takes a loss on.

    A text that is read for one result, a reward or a class, has none.
    """
    if objective_spec(config.objective.name).classifier:
        texts = [text.ids[: answer_start(text)] if len(unit) == 1 else text.ids for text in unit]
        return [TokenizedExample(ids, [False] * len(ids)) for ids in texts]
    return objective_class(config.objective.name).mark_supervised(unit, config.objective)


def load_model(config: TrainArguments, source: Path, task: TaskConfig, dtype: str) -> LanguageModel:
    """Loads the model with the head that the objective trains.

    Raises:
        UserError: it cannot be loaded, or the task names no labels.
    """
    output = objective_spec(config.objective.name).output
    if output == "reward":
        return load_classifier(source, task, dtype, REWARD)
    if output == "classes":
        if not task.label_set:
            raise UserError("a classifier needs the closed set of its labels", where="task.labels", fix="name them")
        return load_classifier(source, task, dtype, task.label_set)
    return load_language_model(source, task, dtype)
