"""Exports a batch of the queue to a file, or as a folder of training records."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sqlalchemy import select

from posttrain.label.formats.datasets import export_datasets
from posttrain.label.formats.items import ANSWER_COLUMNS, Format, PortableAnswer, PortableItem, Shape
from posttrain.label.formats.label_studio import LabelStudio, labelling_interface
from posttrain.label.formats.plain import Csv, JsonLines
from posttrain.label.formats.positions import CODE_POINTS, UTF_16, check_unit, write_positions
from posttrain.label.queue import Queue
from posttrain.label.queue_batches import COUNTS
from posttrain.store.errors import UserError, shorten
from posttrain.store.files import check_new_file, disk_errors, set_default_mode, sync_folder
from posttrain.store.label_tables import label_answers, label_items

FORMATS: dict[str, Format] = {format.name: format for format in (Csv(), JsonLines(), LabelStudio())}
"""File formats by the name that ``--format`` takes."""

DATASETS = "datasets"
"""The format of a folder that Hugging Face's ``datasets`` reads; it is only written."""

_CHUNK = 1000


def export_queue(queue: Queue, batch: str, path: Path, format: str, positions: str | None = None) -> int:
    """Writes a batch to a new file; returns the number of items.

    With the format `DATASETS` the path is a folder, and counted are its training records. Label Studio's labelling
    interface is written next to its file, with the suffix ``.xml``.

    Args:
        queue: The queue.
        batch: Name of the batch.
        path: The new file.
        format: Name of the format.
        positions: Unit of the positions of spans; None: UTF-16 code units for Label Studio, code points for the others.

    Raises:
        UserError: there is no such batch or unit, or the file exists.
    """
    row = queue.batch(batch)
    if row is None:
        raise UserError(f"there is no batch `{shorten(batch)}`", where="--batch")
    check_unit(positions, row.kind)
    if format == DATASETS:
        return sum(export_datasets(path, row, _read_items(queue, row.name)).values())
    check_new_file(path)
    interface = path.with_suffix(".xml") if format == LabelStudio.name else None
    if interface is not None:
        check_new_file(interface)
    shape = Shape(row.kind, None if row.labels is None else tuple(row.labels))
    items = _read_items(queue, row.name)
    if row.kind == "spans":
        unit = positions or (UTF_16 if format == LabelStudio.name else CODE_POINTS)
        items = (write_positions(item, unit) for item in items)
    with _new_file(path) as file:
        count = FORMATS[format].write(file, items, shape)
    if interface is not None:
        with _new_file(interface) as file:
            file.write(labelling_interface(shape))
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
