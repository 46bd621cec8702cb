"""Holds records out of a training set, to measure on, so that nothing of them is trained on."""

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.reading.reader import read
from posttrain.data.records.provenance import record_kinds
from posttrain.data.records.record import concat, input_texts
from posttrain.data.similarity.near_duplicates import near_duplicates
from posttrain.data.split import split_keys
from posttrain.data.split.assignment import first_of_component, hash_draw, links
from posttrain.data.split.config import SplitsConfig
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.store.paths import locate_path
from posttrain.train.standalone import TrainJobConfig
from posttrain.tune.trainings.config import LEAST_HELD_OUT, TuneConfig

log = logging.getLogger("posttrain")

Rows = npt.NDArray[np.bool_]


def split_records(records: pa.Table, tune: TuneConfig, config: TrainJobConfig, root: Path) -> tuple[pa.Table, pa.Table]:
    """Returns the records to train on and those that are held out.

    A share is drawn as `hold_out` does. Records of a held-out file are taken out of the training data.

    Raises:
        UserError: the file cannot be read, or nothing is left to train on or to measure on.
    """
    kept, held_out = split_rows(records, tune, config.columns, config.task, root)
    training = records.filter(pa.array(kept))
    if tune.held_out.share is None and training.num_rows < records.num_rows:
        count = records.num_rows - training.num_rows
        log.warning("  %d of %d training records are held out, and not trained on", count, records.num_rows)
    if training.num_rows == 0:
        raise UserError("leaves nothing to train on", where="tune.held_out", fix="hold out other records")
    if held_out.num_rows == 0:
        what = f"of {records.num_rows} records none can be held out without what is like it"
        raise UserError(what, where="tune.held_out", fix="hold out a larger share, or name a file")
    if held_out.num_rows < LEAST_HELD_OUT:
        log.warning("  measures on %d records: which settings are better is chance among so few", held_out.num_rows)
    return training, held_out


def split_rows(
    records: pa.Table, tune: TuneConfig, columns: dict[str, str] | None, task: TaskConfig, root: Path
) -> tuple[Rows, pa.Table]:
    """Returns which records to train on, bool [records], and the RECORD table of those that are held out.

    Raises:
        UserError: the held-out file cannot be read.
    """
    share = tune.held_out.share
    if share is not None:
        training, rows = hold_out(records, share)
        return training, records.filter(pa.array(rows))
    path = locate_path(root, tune.held_out.data)
    columns = tune.held_out.columns or columns
    held_out = concat(list(read(path, columns, name=tune.held_out.data, read_answer=task.read_answer)))
    held_ids = set(held_out["id"].to_pylist())
    return np.array([record not in held_ids for record in records["id"].to_pylist()], bool), held_out


def hold_out(records: pa.Table, share: float) -> tuple[Rows, Rows]:
    """Chooses the records of a training set to measure on, and those to train on; some may be neither.

    Near duplicates, and records of one input, group or origin, stay together. Sets of such records are held out in the
    order of a hash of their inputs, each that still fits: the same for any order of the records, and as the set grows,
    most stay held out. Records that were derived from others and pseudo-labels are never measured on, nor trained on
    with a record of their set held out. What shares a run of words with a held-out record is not trained on either, by
    the rules of `posttrain.data.steps.decontaminate.Decontaminate`.

    Args:
        records: RECORD table of N rows.
        share: of the records to hold out.

    Returns:
        bool [N]: the rows to train on, and those that are held out.
    """
    keys = split_keys(records, SplitsConfig())
    group = first_of_component(links(keys, near_duplicates(input_texts(records))))
    pseudo = np.array([kind == "pseudo_labels" for kind in record_kinds(records["meta"])], bool)
    plain = ~np.asarray(keys["made"]) & ~pseudo
    draw = np.ones(len(group))
    np.minimum.at(draw, group, hash_draw(keys["input_id"].to_pylist(), keys["group"].to_pylist(), 0))
    size = np.bincount(group[plain], minlength=len(group))
    left, chosen = round(share * len(group)), np.zeros(len(group), bool)
    heads = np.flatnonzero(size)
    for head in heads[np.lexsort((heads, draw[heads]))].tolist():
        if size[head] <= left:
            chosen[head], left = True, left - size[head]
    held_out = plain & chosen[group]
    training = ~chosen[group]
    training[training] = ~overlapping(records.filter(pa.array(training)), records.filter(pa.array(held_out)))
    return training, held_out


def overlapping(records: pa.Table, held_out: pa.Table) -> Rows:
    """Returns which records share something with held-out ones, bool [N]."""
    outcome = apply_step(Decontaminate(), records, evaluation=held_out)
    kept = set(outcome.kept["id"].to_pylist())
    return np.array([record not in kept for record in records["id"].to_pylist()], bool)
