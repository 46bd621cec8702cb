"""From the files named in the config to a clean pool, test set and first set of labelled records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.config import DataConfig
from posttrain.data.flow import Flow
from posttrain.data.inputs import content_digest
from posttrain.data.labelled_before import already_labelled
from posttrain.data.normalise import without_answers
from posttrain.data.problem import unknown_label
from posttrain.data.reading import read
from posttrain.data.recipe import meant_for
from posttrain.data.schema import concat
from posttrain.data.split import split
from posttrain.data.steps.answers import Answers
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Built:
    """RECORD tables; ``rejected`` holds a REJECTED table for each set, ``funnel`` the counts of every step.

    A funnel entry is ``{set, step, reason, count}``. Each set's begin with ``read, in`` and end with
    ``kept, kept``; what stands between adds up to the difference.
    """

    pool: pa.Table
    test: pa.Table
    labelled: pa.Table
    rejected: dict[str, pa.Table]
    funnel: list[dict[str, Any]]


def build_pool_and_test(config: DataConfig, root: Path, labels: Sequence[str] | None = None) -> Built:
    """Read, check and clean what ``config`` names.

    Args:
        root: the folder that relative files start from.
        labels: the closed label set; answers outside it are the user's mistake, and equal inputs with
            different answers are rejected. None for open-ended answers.

    Raises:
        UserError: on the first bad record, with file and line; no files; no answers where they are needed.
    """
    steps = [step.located(root) for step in meant_for(config.steps, labels or ())]
    for step in steps:
        step.check()
    labelled = Flow("labelled", _answered(config.labelled, config, root, labels))
    pool = Flow("pool", without_answers(_records(config.pool, config, root, answers=False)))
    if not config.pool and not config.labelled:
        raise UserError("no file of records is named", where="data.pool", fix="name a file of inputs")
    labelled.through(Answers())
    labelled.through(*[step for step in steps if not step.training_only])
    if isinstance(config.test, float):
        rest, held_out = split(labelled.records, config.test, config.split_seed)
        labelled.move(rest, "split", "held out for the test")
        test = Flow("test", held_out)
    else:
        test = Flow("test", _answered(config.test or [], config, root, labels))
        test.through(Answers())
        test.through(*[step for step in steps if step.evaluation])
    labelled.through(*[step for step in steps if step.training_only], evaluation=test.records)
    pool.through(*[step for step in steps if not step.training_only and not step.needs_answers])
    pool.through(*[step for step in steps if isinstance(step, Decontaminate)], evaluation=test.records)
    pool.through_work(already_labelled(labelled.records))
    flows = (pool, labelled, test)
    return Built(
        pool.records.combine_chunks(),
        test.records.combine_chunks(),
        labelled.records.combine_chunks(),
        {flow.name: flow.rejected for flow in flows},
        [entry for flow in flows for entry in flow.close()],
    )


def input_digests(config: DataConfig, root: Path) -> dict[str, str]:
    """SHA-256 of the content of every file that ``config`` names, by its name in the config.

    Raises:
        UserError: when one is missing or cannot be read.
    """
    return {name: content_digest(_place(root, name), name) for name in config.files}


def _place(root: Path, name: str) -> Path:
    return root / Path(name).expanduser()


def _records(files: Sequence[str], config: DataConfig, root: Path, *, answers: bool) -> pa.Table:
    return concat(
        [table for name in files for table in read(_place(root, name), config.columns, name=name, answers=answers)]
    )


def _answered(files: Sequence[str], config: DataConfig, root: Path, labels: Sequence[str] | None) -> pa.Table:
    tables = [_records([name], config, root, answers=True) for name in files]
    for name, table in zip(files, tables, strict=True):
        answerless = table["completion"].null_count == table.num_rows
        if answerless and (labels is not None or table["text"].null_count == table.num_rows):
            fix = "say in `data.columns` which column is the completion"
            raise UserError("no record has an answer", where=name, fix=fix)
        if labels is not None:
            _refuse_unknown_labels(table, labels)
    return concat(tables)


def _refuse_unknown_labels(table: pa.Table, labels: Sequence[str]) -> None:
    known = set(labels)
    columns = (table[name].to_pylist() for name in ("completion", "source", "line"))
    for answer, source, line in zip(*columns, strict=True):
        if answer is not None and answer not in known:
            raise unknown_label(answer, labels, source, line).error()
