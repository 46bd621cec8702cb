"""Batches of the queue that belong to no round, such as labels of another tool: their answers join the training set."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from posttrain.data.feedback.ingest import rename_columns
from posttrain.label.answer_kinds import KINDS
from posttrain.label.formats.items import is_simple, user_prompt
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import Batch
from posttrain.loop.config import Config
from posttrain.store.files import disk_errors, make_folder, write_atomically
from posttrain.store.hashing import canonical_json
from posttrain.store.workspace import Workspace

# The answers that a task of each kind learns from.
_KINDS = {
    "answer": ("choice",),
    "preference": (),
    "rating": ("rating", "choice"),
    "choices": ("choices", "choice"),
    "spans": ("spans",),
}


@dataclass(frozen=True)
class OwnLabels:
    """The labels of a batch that the next round trains on.

    Attributes:
        file: Where they stand, relative to the workspace; None if they do not join.
        labels: Their number.
        repeated: Number of answers that an earlier batch has too.
        reason: Why they do not join; None if they do.
        is_new: True if the file has changed.
    """

    file: str | None = None
    labels: int = 0
    repeated: int = 0
    reason: str | None = None
    is_new: bool = field(default=False, compare=False)


def write_own_labels(workspace: Workspace, config: Config) -> dict[str, OwnLabels]:
    """Writes the decided answers of each batch without a round to ``data/labelled``, which every round reads.

    Returns:
        What became of each batch, by its name. An answer to an input counts once, whatever batches hold it.
    """
    queue = Queue(workspace.metadata, config.label.queue)
    seen: set[bytes] = set()
    results = {}
    for batch in queue.batches():
        if batch.round is not None:
            continue
        if reason := _reason_unused(batch, config):
            results[batch.name] = OwnLabels(reason=reason)
            continue
        rows, repeated = [], 0
        for row in _records(queue, batch):
            key = canonical_json(row)
            repeated += key in seen
            if key not in seen:
                rows.append(rename_columns(row, config.data.columns or {}))
            seen.add(key)
        file = Path("data") / "labelled" / f"batch-{quote(batch.name, safe=' ')}.jsonl"
        is_new = _write(workspace.root / file, rows)
        results[batch.name] = OwnLabels(file.as_posix() if rows else None, len(rows), repeated, is_new=is_new)
    return results


def _reason_unused(batch: Batch, config: Config) -> str | None:
    """Returns why the answers of a batch are not those of the task; None if they are."""
    task = config.task
    labels = task.label_names
    kinds = _KINDS[task.kind] if task.kind != "answer" or labels else ("choice", "text")
    if batch.kind not in kinds:
        return f"answers of the kind {batch.kind} are not what the task learns from"
    if labels and (others := sorted(set(batch.labels or ()) - set(labels))):
        return f"its labels are not those of the task, such as `{others[0]}`"
    return None


def _records(queue: Queue, batch: Batch) -> Iterator[dict[str, Any]]:
    for item in queue.items(batch.name, "done"):
        # A mark for a model's answer is not one for the text.
        if batch.kind == "rating" and item.content.get("answer"):
            continue
        for record in KINDS[batch.kind].records((item.resolution or {})["answer"], item):
            turns = record.get("prompt") or user_prompt(record.get("text") or "")
            text = turns[0]["content"] if is_simple(turns) else ""
            # A text that could be read as a list of turns stays one turn.
            prompt = text if text and not text.lstrip().startswith(("[", "{")) else turns
            yield {"prompt": prompt, "completion": record["completion"]}


def _write(path: Path, rows: list[dict[str, Any]]) -> bool:
    """Brings a file in line with its rows; returns True if it has changed."""
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if (path.read_bytes() if path.exists() else b"") == content:
        return False
    with disk_errors(path):
        if not rows:
            path.unlink(missing_ok=True)
            return True
        make_folder(path.parent)
    write_atomically(path, content)
    return True
