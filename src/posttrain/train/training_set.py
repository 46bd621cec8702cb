"""Records as a training reads them: tokenised, and checked against the model, whose weights are not needed."""

from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.models.shape import read_config
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig, training_phases
from posttrain.train.data.compatibility import check_model
from posttrain.train.data.config import DIFFICULTY_KEY, curriculum_difficulty
from posttrain.train.data.encoding import load_encoder
from posttrain.train.data.record_columns import RecordColumns, row_error
from posttrain.train.data.token_set import TokenSet
from posttrain.train.data.tokenise import tokenise
from posttrain.train.objectives.build import record_shape

ANY_LENGTH = 2**30  # tokens; no record is longer


@dataclass(frozen=True, eq=False)
class TrainingRecords:
    """The records of a training, and everything besides their tokens that it reads from them.

    Args:
        table: rows of the record schema.
        kinds: each record's kind, by the columns that phases mix by or that names the tasks of gradient surgery.
        difficulties: float64 [R], for a curriculum by a column.
        weights: float64 [R], weights in the loss; None: all 1.
        margins: float64 [R], how much better chosen answers are; None where the objective reads none.
    """

    table: pa.Table
    kinds: dict[str, list[str]]
    difficulties: np.ndarray | None
    weights: np.ndarray | None
    margins: np.ndarray | None

    def split(self, kept: np.ndarray) -> tuple["TrainingRecords", list[str]]:
        """Returns the records where ``kept``, bool [R], is True, and the ids of the others."""
        optional = (self.difficulties, self.weights, self.margins)
        columns = (None if column is None else column[kept] for column in optional)
        kinds = {name: list(compress(values, kept)) for name, values in self.kinds.items()}
        others = self.table.filter(pa.array(~kept))["id"].to_pylist()
        return TrainingRecords(self.table.filter(pa.array(kept)), kinds, *columns), others


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The tokenised records of a training.

    Args:
        units: their tokens.
        records: the records; their weights are above 0 and 1 in the mean.
        weightless: ids of the records of weight 0, which are left out.
        too_long: ids of the records that are left out as they are longer than ``max_length``.
        identical: ids of the pairs that are left out as both answers are the same.
    """

    units: TokenSet
    records: TrainingRecords
    weightless: list[str]
    too_long: list[str]
    identical: list[str]


def read_training_set(
    source: str,
    records: pa.Table,
    config: TrainConfig,
    task: TaskConfig,
    scratch: Path,
    difficulties: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> TrainingSet:
    """Tokenises the records, or loads their token set, and checks them against the model.

    Args:
        source: the model, as ``posttrain.models.sources.locate`` names it.
        records: rows of the record schema.
        config: settings of the training.
        task: task of the model.
        scratch: folder of the token sets.
        difficulties: float [records], in place of the column that the curricula name.
        weights: float [records], of the records in the loss, times those of the column that the config names.

    Raises:
        UserError: there is no record, or one cannot be used.
    """
    if records.num_rows == 0:
        raise UserError("there is no labelled record to train on")
    read, identical = _read_records(config, records, difficulties, weights), list[str]()
    shape, encoder = record_shape(config, records), load_encoder(source, task)
    folder, processes = scratch / "tokens", config.loader.processes
    too_long: list[str] = []
    weightless: list[str] = []
    if shape == "pair":
        # Reading skips these; steps that rewrite records can make more.
        read, identical = read.split(different_answers(records))
    if config.too_long == "drop":
        # Whole first: the length of a record is known when it is tokenised.
        whole = tokenise(encoder, read.table, ANY_LENGTH, shape, folder, processes)
        fits = whole.longest <= config.max_length
        require_fitting(int(fits.sum()), len(fits), config.max_length)
        read, too_long = read.split(fits)
    if read.weights is not None:
        # Weight 0 is left out here: a step of such records alone would divide by 0.
        weights, used = read.weights, read.weights > 0
        if not used.any():
            raise UserError("the records that are short enough have a weight of 0", where="train.max_length")
        read, weightless = read.split(used)
        read = replace(read, weights=weights[used] / weights[used].mean())
    units = tokenise(encoder, read.table, config.max_length, shape, folder, processes)
    check_model(read_config(source), encoder.chat.tokenizer, units, read.table)
    return TrainingSet(units, read, weightless, too_long, identical)


def different_answers(records: pa.Table) -> np.ndarray:
    """Returns bool [R], False for pairs of two equal answers.

    Raises:
        UserError: all are.
    """
    different = pc.not_equal(records["completion"], records["rejected"]).fill_null(True).to_numpy()
    if not different.any():
        raise row_error(records, 0, "its chosen and its rejected answer are the same, as in all others")
    return np.asarray(different)


def _read_records(
    config: TrainConfig, records: pa.Table, difficulties: np.ndarray | None, weights: np.ndarray | None
) -> TrainingRecords:
    """Reads all columns that the config names, once; arguments as of `read_training_set`."""
    columns, difficulty = RecordColumns(records), curriculum_difficulty(training_phases(config))
    if difficulties is None and difficulty not in (None, "loss"):
        difficulties = columns.numbers(str(difficulty), DIFFICULTY_KEY)
    return TrainingRecords(
        records,
        columns.kinds(config.phases, config.surgery.task_column),
        difficulties,
        _record_weights(config, columns, weights),
        columns.margins() if config.spec.margins else None,
    )


def require_fitting(count: int, total: int, max_length: int) -> None:
    """Raises a UserError if `train.too_long` would leave none of ``total`` records."""
    if not count:
        what = f"all {total:,} records are longer than {max_length:,} tokens"
        raise UserError(what, where="train.max_length", fix="raise it, or set train.too_long to truncate")


def _record_weights(config: TrainConfig, columns: RecordColumns, given: np.ndarray | None) -> np.ndarray | None:
    """Returns the records' weights in the loss: those given, times the column that the config names; None: all 1.

    Raises:
        UserError: the objective takes none, a record has no valid one, or all are 0.
    """
    if config.weight is None and given is None:
        return None
    if config.spec.shape in ("labelled", "teacher"):
        what = f"{config.objective.name} has no weights of records"
        raise UserError(what, where="train.weight", fix="leave it out, or take another objective")
    if config.weight is None:
        return given
    weights = columns.weights(config.weight)
    if not weights.any():
        raise UserError(f"every record's weight `{config.weight}` is 0", where="train.weight")
    return weights if given is None else weights * given
