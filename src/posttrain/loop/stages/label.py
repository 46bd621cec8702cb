"""Label: asks people, or an oracle, for the labels of the batch."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.reading.reader import read
from posttrain.data.reading.rows import unknown_label_problem
from posttrain.label.annotator import AnnotationRequest, label_summary
from posttrain.label.config import build_annotator
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.score_files import BATCH, SCORES, chosen_records
from posttrain.loop.stage import Stage
from posttrain.loop.state import RoundState
from posttrain.select.pool_sample import PoolShare, estimate_pool_share
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")

LABELS = "labels.parquet"


def check_answers(config: Config, root: Path) -> None:
    """Check before any work that an oracle's file is there and keeps to the label set.

    Raises:
        UserError: if not, with file and line.
    """
    if config.label.annotator != "oracle":
        return
    path = _answers(config, root)
    name, known = str(config.label.file), set(config.task.label_set)
    columns = config.label.columns if config.label.columns is not None else _columns(config)
    for table in read(path, columns, name=name):
        for answer, line in zip(table["completion"].to_pylist(), table["line"].to_pylist(), strict=True):
            if known and answer is not None and answer not in known:
                raise unknown_label_problem(answer, config.task.label_set, name, line).error()


@dataclass(frozen=True)
class Label(Stage):
    """Asks the annotator for the labels of a batch.

    Args:
        selection: id of the batch.
        pool: id of the pool that it is from.
    """

    selection: str
    pool: str
    name = "label"
    kind = "labels"

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Label the batch, if there is one.

        Raises:
            Waiting: people have not labelled it yet.
        """
        state = context.state
        if state.selection is None or state.asked is None:
            return state
        labels = context.run(cls(state.selection, state.asked))
        context.workspace.metadata.update_round(context.number, status="open")
        log.info("  labelled %d records, %d classes", labels.meta["labels"], len(labels.meta["classes"]))
        if agreement := pool_agreement(context.workspace, state.selection, labels.id):
            log.info(
                "  of %d drawn at random, the champion had %.0f%% right (of the pool: %.0f%% to %.0f%%)",
                *(agreement.drawn, 100 * agreement.value, 100 * agreement.low, 100 * agreement.high),
            )
        return context.update(labelled=labels.id)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """The batch, its pool, and the content of an oracle's file."""
        inputs = {"selection": self.selection, "pool": self.pool}
        if context.config.label.annotator == "oracle":
            inputs["answers"] = file_digest(_answers(context.config, context.workspace.root))
        return inputs

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Who labels, and which labels there are."""
        config = context.config.label
        return {
            "annotator": config.annotator,
            "error_rate": config.error_rate.get(context.number, 0.0),
            "labels": context.config.task.label_set,
            "columns": config.columns if config.columns is not None else _columns(context.config),
        }

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Write the answers, a RECORD table."""
        config, root = context.config, context.workspace.root
        batch, suggestions = chosen_records(context, context.artifact(self.selection), context.artifact(self.pool))
        request = AnnotationRequest(
            round=context.number,
            seed=context.seed("label"),
            folder=root,
            labels=config.task.label_set or None,
            suggestions=suggestions,
        )
        annotator = build_annotator(config.label, root, _read, _columns(config))
        answers = annotator.annotate(batch, request)
        parquet.write_table(answers, out / LABELS)
        return label_summary(answers, suggestions)


def _read(path: Path, columns: Any, *, name: str | None = None) -> Iterator[pa.Table]:
    return read(path, columns, name=name)


def _columns(config: Config) -> dict[str, str] | None:
    """The data's columns without the group, which a file of answers need not have."""
    return {name: column for name, column in (config.data.columns or {}).items() if name != "group"} or None


def _answers(config: Config, root: Path) -> Path:
    """The oracle's file."""
    name = config.label.file
    if not name:
        raise UserError("the oracle needs a file of answers", where="label.file", fix="name it")
    path = root / Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"no such file: {name}", where="label.file")
    return path


def pool_agreement(workspace: Workspace, selection: str, labels: str) -> PoolShare | None:
    """The share of the pool on which the champion's answers are those that people would give.

    All other records of a batch were chosen as they are hard, and say little of the rest. Written answers may be right
    in other words, of which only people could say so: of free text nothing is estimated.

    Args:
        workspace: where both lie.
        selection: id of the batch.
        labels: id of its labels.

    Returns:
        None where none was drawn, the champion had not been trained yet, or there is no closed label set.
    """
    batch = parquet.read_table(workspace.artifacts.path(selection) / BATCH)
    if "inclusion" not in batch.column_names:
        return None
    scores = workspace.metadata.producers(selection)[-1].inputs["scores"]
    if "probabilities" not in parquet.read_schema(workspace.artifacts.path(scores) / SCORES).names:
        return None
    drawn = batch.filter(compute.and_(compute.is_valid(batch["inclusion"]), compute.is_valid(batch["predicted"])))
    answers = parquet.read_table(workspace.artifacts.path(labels) / LABELS, columns=["id", "completion"]).to_pydict()
    answer_of = dict(zip(answers["id"], answers["completion"], strict=True))
    rows = [row for row in drawn.to_pylist() if answer_of.get(row["id"]) is not None]
    agrees = np.array([answer_of[row["id"]] == row["predicted"] for row in rows], bool)
    return estimate_pool_share(agrees, np.array([row["inclusion"] for row in rows], np.float64))
