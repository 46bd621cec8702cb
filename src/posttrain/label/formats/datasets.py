"""Exports a batch's final answers as a folder of training records that Hugging Face's ``datasets`` reads."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.label.answer_kinds import KINDS, Question
from posttrain.label.formats.files import to_json
from posttrain.label.formats.items import PortableItem, user_prompt
from posttrain.label.queue_rows import Batch
from posttrain.store.errors import UserError
from posttrain.store.files import check_new_file, disk_errors, sync_tree, temporary_folder

_TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
# Where each record comes from, in every shape.
_ORIGIN = [("id", pa.string()), ("annotators", pa.list_(pa.string())), ("decided", pa.string()), ("meta", pa.string())]

SHAPES: Mapping[str, pa.Schema] = {
    "sft": pa.schema([("messages", _TURNS), *_ORIGIN]),
    "preference": pa.schema([("prompt", _TURNS), ("chosen", _TURNS), ("rejected", _TURNS), *_ORIGIN]),
    "kto": pa.schema([("prompt", _TURNS), ("completion", _TURNS), ("label", pa.bool_()), *_ORIGIN]),
}
"""Columns by shape, as TRL and others read them: answers to imitate, pairs of answers, answers that are good or bad."""

_TITLES = {"sft": "answers to imitate", "preference": "pairs of a better and a worse answer", "kto": "rated answers"}
_ROWS = 1000


def export_datasets(folder: Path, batch: Batch, items: Iterator[PortableItem]) -> dict[str, int]:
    """Writes the decided items to a new folder; returns the number of records by shape.

    Gold items are left out, and so are answers that a model learns nothing from, such as a tie.

    Raises:
        UserError: something has this path, or no item is decided yet.
    """
    check_new_file(folder)
    with temporary_folder(folder.absolute().parent) as scratch:
        writers = {shape: _ShapeWriter(scratch / shape, schema) for shape, schema in SHAPES.items()}
        try:
            for item in items:
                for shape, row in _rows(item, batch):
                    writers[shape].add(row)
        finally:
            for writer in writers.values():
                writer.close()
        counts = {shape: writer.count for shape, writer in writers.items() if writer.count}
        if not counts:
            raise UserError(f"no item of the batch `{batch.name}` has an answer to learn from yet")
        with disk_errors(folder):
            (scratch / "README.md").write_text(_card(batch, counts), encoding="utf-8")
            sync_tree(scratch)
            # The folder appears under its name once it is whole.
            os.rename(scratch, folder)
    return counts


class _ShapeWriter:
    """A Parquet file that is begun with its first row; memory holds one group of rows."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.folder, self.schema, self.count = folder, schema, 0
        self._rows: list[dict[str, Any]] = []
        self._file: parquet.ParquetWriter | None = None

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self.count += 1
        if len(self._rows) == _ROWS:
            self._write()

    def close(self) -> None:
        if self._rows:
            self._write()
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        with disk_errors(self.folder):
            if self._file is None:
                self.folder.mkdir()
                self._file = parquet.ParquetWriter(self.folder / "train.parquet", self.schema)
            self._file.write_table(pa.Table.from_pylist(self._rows, self.schema))
        self._rows = []


def _rows(item: PortableItem, batch: Batch) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the shape and the row of each record that an item's final answer becomes."""
    resolution = item.details.get("resolution")
    if item.expected is not None or item.details.get("status") != "done" or resolution is None:
        return
    meta = item.content.get("meta")
    origin = {
        "id": item.record,
        "annotators": sorted(resolution.get("by") or ()),
        "decided": resolution.get("how"),
        "meta": to_json(meta) if meta else None,
    }
    for record in KINDS[batch.kind].records(resolution["answer"], Question(item.content, batch.labels)):
        prompt = record.get("prompt") or user_prompt(record.get("text") or "")
        answer = _reply(record["completion"])
        if "label" in record:
            yield "kto", {"prompt": prompt, "completion": answer, "label": record["label"], **origin}
        elif "rejected" in record:
            yield "preference", {"prompt": prompt, "chosen": answer, "rejected": _reply(record["rejected"]), **origin}
        # A rated answer is not one to imitate, even if it is good: the label in its record says so.
        if batch.kind not in ("preference", "ranking") and "label" not in record:
            yield "sft", {"messages": [*prompt, *answer], **origin}


def _reply(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _card(batch: Batch, counts: Mapping[str, int]) -> str:
    """Returns the dataset card; its head tells ``datasets`` where the files are."""
    configs = "".join(
        f"- config_name: {shape}\n  data_files:\n  - split: train\n    path: {shape}/train.parquet\n"
        for shape in counts
    )
    table = "".join(f"| `{shape}` | {_TITLES[shape]} | {count:,} |\n" for shape, count in counts.items())
    labels = "".join(f"- {to_json(label)}\n" for label in batch.labels or ())
    return (
        f"---\nconfigs:\n{configs}---\n\n# Labels of the batch {to_json(batch.name)}\n\n"
        f"Answers of the kind `{batch.kind}`, exported by posttrain. `annotators` gave the final answer, which was\n"
        "reached as `decided` says: single, majority, posterior, review or model.\n\n"
        f"| config | records | count |\n|---|---|---|\n{table}" + (f"\nLabels:\n\n{labels}" if labels else "")
    )
