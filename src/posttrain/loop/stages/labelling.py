"""Label the batch, and add the labels to the training set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.data.reading.problem import unknown_label
from posttrain.data.reading.tables import read
from posttrain.data.records.schema import concat
from posttrain.data.sets.version import Dataset, training_version, write_dataset
from posttrain.label.annotator import Request
from posttrain.label.quality import summary
from posttrain.label.registry import annotator
from posttrain.loop.config import Config
from posttrain.loop.stages.choose import chosen_records
from posttrain.loop.stages.collect import Collected
from posttrain.loop.suites import measured_on, suite_digests, suite_settings
from posttrain.loop.turn import Turn
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import UserError
from posttrain.store.hashing import file_digest

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
                raise unknown_label(answer, config.task.label_set, name, line).error()


def label(turn: Turn, selection: Artifact, pool: Artifact) -> Artifact:
    """The batch with its labels.

    Raises:
        Waiting: if people have not labelled it yet.
    """
    config = turn.config

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        batch, suggestions = chosen_records(turn, selection, pool)
        request = Request(
            round=turn.number,
            seed=turn.seed("label"),
            folder=turn.workspace.root,
            labels=config.task.label_set or None,
            suggestions=suggestions,
        )
        asked = annotator(config.label, turn.workspace.root, _read, _columns(config))
        answers = asked.annotate(batch, request)
        parquet.write_table(answers, out / LABELS)
        return summary(answers, suggestions)

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


def extend(turn: Turn, parent: str | None, collected: Collected, labels: Artifact | None) -> Artifact:
    """The training set: its parent, the labelled files' records as they are now and this round's labels.

    What gives away what is measured on at present is taken out, of the parent's records too.

    Args:
        turn: the round.
        parent: the dataset artifact to build on.
        collected: the labelled files' records and the test set.
        labels: this round's labels; None where nothing was asked for.
    """
    decontaminate = turn.config.data.decontamination
    drops = [step.located(turn.workspace.root) for step in turn.config.data.drops]

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        before = turn.dataset(parent) if parent else None
        labelled = turn.dataset(collected.labelled.id).records
        measured = measured_on(turn.config, turn.dataset(collected.test.id).records, turn.workspace.root)
        version = training_version(
            before,
            _new(turn, before, labelled, labels),
            parent_id=parent,
            labels=turn.config.task.label_set or None,
            labelled=labelled,
            decontaminate=decontaminate,
            measured=concat(list(measured.values())),
            drops=drops,
        )
        return write_dataset(out, version.records, version.rejected, version.meta)

    inputs = {"labelled": collected.labelled.id, "test": collected.test.id}
    inputs |= suite_digests(turn.config, turn.workspace.root)
    inputs |= {"labels": labels.id} if labels else {}
    inputs |= {"parent": parent} if parent else {}
    settings: dict[str, Any] = {"labels": turn.config.task.label_set}
    settings["decontaminate"] = decontaminate.key() if decontaminate else None
    if drops:
        settings["drop"] = [step.key() for step in drops]
    settings |= suite_settings(turn.config, turn.workspace.root)
    artifact = turn.stage("dataset", "dataset", inputs, settings, work, seeded=False)
    if turn.number and not turn.workspace.metadata.arm:
        turn.workspace.metadata.name_artifact("train", artifact.id, parent)
    return artifact


def _new(turn: Turn, before: Dataset | None, labelled: pa.Table, labels: Artifact | None) -> pa.Table:
    """Records that the parent does not hold: of the labelled files, and of this round's batch."""
    known = pa.array(before.records["id"].to_pylist() if before else [], pa.string())
    came = labelled.filter(pa.compute.invert(pa.compute.is_in(labelled["id"], value_set=known)))
    if labels is None:
        return came
    return pa.concat_tables([came, parquet.read_table(turn.path(labels.id) / LABELS, schema=came.schema)])


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
