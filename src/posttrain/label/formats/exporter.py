"""Exports a batch of the queue to a file of another tool, or as a folder of training records."""

import csv
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as parquet
from sqlalchemy import select

from posttrain.label.answer_kinds import KINDS, Question
from posttrain.label.formats.argilla import Argilla, argilla_settings
from posttrain.label.formats.codec import (
    ANSWER_COLUMNS,
    EXTENSION,
    Codec,
    PortableAnswer,
    PortableItem,
    Shape,
    export_record,
    user_prompt,
)
from posttrain.label.formats.doccano import Csv, Doccano, DoccanoCsv, escape_row
from posttrain.label.formats.files import to_json
from posttrain.label.formats.label_studio import LabelStudio, labelling_interface
from posttrain.label.queue import Queue
from posttrain.label.queue_batches import COUNTS
from posttrain.label.queue_rows import Batch
from posttrain.store.errors import UserError, shorten
from posttrain.store.files import (
    check_new_file,
    disk_errors,
    set_default_mode,
    sync_folder,
    sync_tree,
    temporary_folder,
)
from posttrain.store.label_tables import label_answers, label_items

CODECS: dict[str, Codec] = {codec.name: codec for codec in (LabelStudio(), Argilla(), Doccano(), DoccanoCsv(), Csv())}
"""File formats by the name that ``--format`` takes."""

DATASETS = "datasets"
"""The format of a folder that Hugging Face's ``datasets`` reads; it is only written."""

_CHUNK = 1000


def export_queue(queue: Queue, batch: str, path: Path, format: str) -> int:
    """Writes a batch to a new file; returns the number of items.

    With the format `DATASETS` the path is a folder, and counted are its training records.

    Label Studio's labelling interface and Argilla's settings are written beside it, with ``.xml`` or
    ``.settings.json`` in place of the suffix.

    Raises:
        UserError: there is no such batch, the file exists, or the format cannot hold this kind of answers.
    """
    row = queue.batch(batch)
    if row is None:
        raise UserError(f"there is no batch `{shorten(batch)}`", where="--batch")
    if format == DATASETS:
        return sum(export_datasets(path, row, _read_items(queue, row.name)).values())
    codec = CODECS[format]
    if row.kind not in codec.kinds:
        raise UserError(f"{format} has no place for answers of the kind {row.kind}", fix="--format label-studio")
    check_new_file(path)
    beside = {"label-studio": path.with_suffix(".xml"), "argilla": path.with_suffix(".settings.json")}.get(format)
    if beside is not None:
        check_new_file(beside)
    asked = row.settings.get("question") or {}
    question = asked.get("name") if asked.get("format") == codec.name else None
    shape = Shape(row.kind, None if row.labels is None else tuple(row.labels), question)
    with _new_file(path) as file:
        records = (
            export_record(codec, item, shape, first=number == 0)
            for number, item in enumerate(_read_items(queue, row.name))
        )
        count, longest = _write_records(file, codec, records)
    if beside is not None:
        text = labelling_interface(shape) if format == "label-studio" else to_json(argilla_settings(shape, longest))
        with _new_file(beside) as file:
            file.write(text)
    return count


def _read_items(queue: Queue, batch: str) -> Iterator[PortableItem]:
    """Yields the items of a batch in the order of their ids, gold items too, a chunk in memory at a time."""
    of_batch, last = label_items.c.batch == batch, 0
    with queue.metadata.reading() as connection:
        while True:
            query = select(label_items).where(of_batch, label_items.c.id > last).order_by(label_items.c.id)
            rows = connection.execute(query.limit(_CHUNK)).mappings().all()
            if not rows:
                return
            last = rows[-1]["id"]
            of_item: dict[int, list[PortableAnswer]] = {row["id"]: [] for row in rows}
            answers = (
                select(label_answers).where(label_answers.c.item.in_(of_item), COUNTS).order_by(label_answers.c.id)
            )
            for row in connection.execute(answers).mappings():
                details = {name: row[name] for name in ANSWER_COLUMNS if row[name] is not None}
                details["created_at"] = row["created_at"].isoformat()
                of_item[row["item"]].append(PortableAnswer(row["annotator"], row["answer"], row["status"], details))
            for row in rows:
                details = {
                    name: row[name] for name in ("priority", "reason", "wanted", "checked", "status", "resolution")
                }
                yield PortableItem(
                    record=row["record"],
                    content=row["content"],
                    suggestion=row["suggestion"],
                    expected=row["expected"],
                    answers=tuple(of_item[row["id"]]),
                    details={
                        name: value for name, value in details.items() if value is not None and value is not False
                    },
                )


def _write_records(file: IO[str], codec: Codec, records: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Writes records; returns their number, and the largest number of candidates of one."""
    count = longest = 0
    if isinstance(codec, DoccanoCsv):
        return _write_rows(file, records), 2
    lines = isinstance(codec, Doccano)
    for record in records:
        if not lines:
            file.write(",\n" if count else "[\n")
        file.write(to_json(record) + ("\n" if lines else ""))
        fields = record.get("fields", ())
        longest, count = max(longest, sum(name.startswith("candidate_") for name in fields)), count + 1
    if not lines:
        file.write("\n]\n" if count else "[]\n")
    return count, max(longest, 2)


def _write_rows(file: IO[str], records: Iterable[Mapping[str, Any]]) -> int:
    columns: dict[str, None] = {}
    # The header has the columns of all rows, and comes first.
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="") as spool:
        for record in records:
            columns.update(dict.fromkeys(record))
            spool.write(to_json(record) + "\n")
        spool.seek(0)
        names = [name for name in columns if name != EXTENSION]
        # With CRLF between rows, the default: only then is each kind of line end in a text quoted.
        writer, count = csv.writer(file), 0
        for line in spool:
            if not count:
                writer.writerow([*names, EXTENSION])
            writer.writerow(escape_row(json.loads(line), [*names, EXTENSION]))
            count += 1
    return count


@contextmanager
def _new_file(path: Path) -> Iterator[IO[str]]:
    """Opens a file that appears under its name once it is whole."""
    with disk_errors(path):
        descriptor, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        set_default_mode(path)
        sync_folder(path.absolute().parent)


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
        # A rating is no answer to imitate, even a good one: its record says so by its label.
        if "label" in record:
            yield "kto", {"prompt": prompt, "completion": answer, "label": record["label"], **origin}
        elif "rejected" in record:
            yield "preference", {"prompt": prompt, "chosen": answer, "rejected": _reply(record["rejected"]), **origin}
        if batch.kind not in ("rating", "preference", "ranking"):
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
