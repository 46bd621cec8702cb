"""Records as a training is to meet them: tokenised, and checked against the model, whose weights are not needed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from posttrain.models.shape import read_config
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig, training_phases
from posttrain.train.data.compatibility import check_model
from posttrain.train.data.config import curriculum_difficulty
from posttrain.train.data.encoding import load_encoder
from posttrain.train.data.record_columns import check_margins, mix_kinds, numeric_column, weight_column
from posttrain.train.data.token_set import TokenSet
from posttrain.train.data.tokenise import tokenise
from posttrain.train.objectives.build import record_shape
from posttrain.train.objectives.registry import OBJECTIVES


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """A training's records.

    Args:
        units: their tokens.
        kinds: by column that a stage mixes by, what each record is.
        difficulties: float64 [R], where a curriculum goes by a column.
        weights: float64 [R], above 0 and 1 in the mean: what each counts in the loss; None: all alike.
        weightless: ids of the records whose weight is 0, which are not in it.
    """

    units: TokenSet
    kinds: dict[str, list[str]]
    difficulties: np.ndarray | None
    weights: np.ndarray | None
    weightless: list[str]


def read_training_set(
    source: str,
    records: pa.Table,
    config: TrainConfig,
    task: TaskConfig,
    scratch: Path,
    difficulties: np.ndarray | None = None,
) -> TrainingSet:
    """Tokenise the records, or find them tokenised.

    Args:
        source: the model, as ``posttrain.models.sources.locate`` names it.
        records: rows of the record schema.
        config: how they are trained on.
        task: what the model is asked to do.
        scratch: where the tokens are kept.
        difficulties: float [records], in place of the column that curricula go by.

    Raises:
        UserError: there is no record, or one cannot be used.
    """
    if records.num_rows == 0:
        raise UserError("there is no labelled record to train on")
    if difficulties is None:
        difficulties = _record_difficulties(config, records)
    counts, weightless = _record_weights(config, records), []
    if counts is not None:
        met = counts > 0
        weightless = records.filter(pa.array(~met))["id"].to_pylist()
        records, counts = records.filter(pa.array(met)), counts[met] / counts[met].mean()
        difficulties = None if difficulties is None else difficulties[met]
    kinds = mix_kinds(config, records)
    shape, encoder = record_shape(config, records), load_encoder(source, task)
    units = tokenise(encoder, records, config.max_length, shape, scratch / "tokens", config.loader.processes)
    check_model(read_config(source), encoder.chat.tokenizer, units, records)
    if config.objective == "reward":
        check_margins(records, units.margins)
    return TrainingSet(units, kinds, difficulties, counts, weightless)


def _record_weights(config: TrainConfig, records: pa.Table) -> np.ndarray | None:
    """What the records count in the loss, where the config names a column of it.

    Raises:
        UserError: the objective takes none, a record has none that can be used, or all are 0.
    """
    if config.weight is None:
        return None
    if OBJECTIVES[config.objective].shape in ("labelled", "teacher"):
        what = f"{config.objective} has no weights of records"
        raise UserError(what, where="train.weight", fix="leave it out, or take another objective")
    found = weight_column(records, config.weight)
    if not found.any():
        raise UserError(f"every record's weight `{config.weight}` is 0", where="train.weight")
    return found


def _record_difficulties(config: TrainConfig, records: pa.Table) -> np.ndarray | None:
    """The records' difficulty, where a curriculum goes by a column."""
    name = curriculum_difficulty(training_phases(config))
    return None if name in (None, "loss") else numeric_column(records, str(name), "train.curriculum.difficulty")
