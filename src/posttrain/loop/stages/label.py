"""Label the batch, and add the labels to the training set."""

from collections.abc import Iterator
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
from posttrain.select.pool_sample import PoolShare, estimate_pool_share
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest
from posttrain.store.workspace import Workspace

LABELS = "labels.parquet"


def check_answers(config: Config, root: Path) -> None:
    """Find out before any work whether an oracle's file is there and keeps to the label set.

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


def label(turn: RoundContext, selection: Artifact, pool: Artifact) -> Artifact:
    """The batch with its labels.

    Raises:
        Waiting: if people have not labelled it yet.
    """
    config = turn.config

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        batch, suggestions = chosen_records(turn, selection, pool)
        request = AnnotationRequest(
            round=turn.number,
            seed=turn.seed("label"),
            folder=turn.workspace.root,
            labels=config.task.label_set or None,
            suggestions=suggestions,
        )
        asked = build_annotator(config.label, turn.workspace.root, _read, _columns(config))
        answers = asked.annotate(batch, request)
        parquet.write_table(answers, out / LABELS)
        return label_summary(answers, suggestions)

    inputs = {"selection": selection.id, "pool": pool.id}
    if config.label.annotator == "oracle":
        inputs["answers"] = file_digest(_answers(config, turn.workspace.root))
    settings = {
        "annotator": config.label.annotator,
        "error_rate": config.label.error_rate.get(turn.number, 0.0),
        "labels": config.task.label_set,
        "columns": config.label.columns if config.label.columns is not None else _columns(config),
    }
    return turn.stage("label", "labels", inputs, settings, work)


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
