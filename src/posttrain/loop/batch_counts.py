"""Accounts for every record of a round's batch: asked, answered, skipped or left, and which answers were used."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.steps.duplicates import Exact
from posttrain.data.versions.version import read_dataset
from posttrain.loop.score_files import LABELS, UNLABELLED
from posttrain.loop.state import RoundState
from posttrain.report.formatting import reason_text
from posttrain.store.message import Message
from posttrain.store.workspace import Workspace

STAGE = "dataset"
"""Name of the stage, under which a round's state has the counts."""

_COLUMNS = ["input_id", "meta"]


@dataclass(frozen=True)
class BatchCounts:
    """Counts of a round's batch by outcome: used, skipped, left.

    ``asked`` is ``answered + skipped + left``, and ``answered`` is ``used + duplicates + sum(rejected.values())``.

    Attributes:
        asked: Records of the batch.
        answered: Records that got a label; ``by_model`` of these without people.
        skipped: Records that people left without a label on purpose.
        left: Records that nobody had decided when the round went on; they are in the pool again.
        used: Labels that joined the training set.
        duplicates: Labels that the training set held already.
        rejected: Labels that did not join the training set, by the reason.
        skips: Skipped records by the reason, where it is known.
    """

    asked: int = 0
    answered: int = 0
    by_model: int = 0
    skipped: int = 0
    left: int = 0
    used: int = 0
    duplicates: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    skips: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON values that a round's row stores."""
        return asdict(self)

    @property
    def sentence(self) -> Message:
        """The counts in words, without those that are 0."""
        parts = [Message("{count} used", count=self.used)]
        parts += [Message("{count} duplicates", count=self.duplicates)] if self.duplicates else []
        if self.rejected:
            parts.append(_with_reasons("{count} rejected ({reasons})", self.rejected_total, self.rejected))
        if self.skips:
            parts.append(_with_reasons("{count} skipped ({reasons})", self.skipped, self.skips))
        elif self.skipped:
            parts.append(Message("{count} skipped", count=self.skipped))
        parts += [Message("{count} left and in the pool again", count=self.left)] if self.left else []
        return Message("{count} asked: {parts}", count=self.asked, parts=Message.joined(", ", parts))

    @property
    def rejected_total(self) -> int:
        """Number of labels that were rejected, duplicates aside."""
        return sum(self.rejected.values())


def count_batch(workspace: Workspace, labels: str, dataset: str) -> BatchCounts:
    """Counts what became of a batch.

    Args:
        workspace: The workspace.
        labels: Id of the batch's labels.
        dataset: Id of the training set that they were to join.

    Raises:
        DamagedArtifactError: one of the two is damaged or lost.
    """
    meta = workspace.artifacts.get(labels).meta
    table = parquet.read_table(workspace.artifacts.path(labels) / LABELS, columns=_COLUMNS)
    inputs = table["input_id"].combine_chunks()
    training_set = read_dataset(workspace.artifacts.path(dataset))
    marks = {_labelled_by(text) for text in table["meta"].to_pylist()}
    # By input and mark: a labelled file may hold the same input, and earlier rounds too.
    used = {row["input_id"] for row in _of_batch(training_set.records, inputs, marks)}
    rejections = {row["input_id"]: row for row in _of_batch(training_set.rejected, inputs, marks)}
    rejected: Counter[str] = Counter()
    duplicates = 0
    for input_id in inputs.to_pylist():
        row = rejections.get(input_id, {"step": "", "reason": "another input after cleaning"})
        duplicates += input_id not in used and row["step"] == Exact.name
        rejected[row["reason"]] += input_id not in used and row["step"] != Exact.name
    answered = int(meta["labels"])
    return BatchCounts(
        asked=answered + meta.get("dropped", 0) + meta.get("left", 0),
        answered=answered,
        by_model=sum(count for name, count in meta["annotators"].items() if name.startswith("model:")),
        skipped=meta.get("dropped", 0),
        left=meta.get("left", 0),
        used=sum(input_id in used for input_id in inputs.to_pylist()),
        duplicates=duplicates,
        rejected=dict(sorted((+rejected).items())),
        skips=meta.get("skips", {}),
    )


def batch_counts(state: RoundState) -> BatchCounts | None:
    """Returns what became of a round's batch; None before its answers are in, and without a batch."""
    values = state.results.get(STAGE)
    return BatchCounts(**values) if values else None


def read_unlabelled(workspace: Workspace, labels: str) -> dict[str, str]:
    """Reads why records of a batch have no label, by their ids; empty where all have one.

    Raises:
        DamagedArtifactError: the labels are damaged or lost.
    """
    path: Path = workspace.artifacts.path(labels) / UNLABELLED
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _of_batch(table: pa.Table, inputs: pa.Array, marks: set[str]) -> list[dict[str, Any]]:
    """Returns the records of a table that are answers of the batch."""
    rows = table.filter(compute.is_in(table["input_id"], value_set=inputs)).to_pylist()
    return [row for row in rows if _labelled_by(row["meta"]) in marks]


def _labelled_by(meta: str | None) -> str:
    """Returns who gave a label and in which round, as text that can be compared."""
    return json.dumps(json.loads(meta or "{}").get("labelled_by"), sort_keys=True)


def _with_reasons(template: str, count: int, reasons: Mapping[str, int]) -> Message:
    listed = (Message("{reason}: {count}", reason=reason_text(reason), count=each) for reason, each in reasons.items())
    return Message(template, count=count, reasons=Message.joined(", ", listed))
