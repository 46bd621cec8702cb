"""From an inbox's sealed segments to files of records, each segment taken once."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.collecting.checked_lines import read_lines
from posttrain.data.collecting.feedback import KINDS, Kind, Ratings, row_of
from posttrain.data.collecting.sealing import seal
from posttrain.data.collecting.segment import sealed
from posttrain.data.reading.tables import read
from posttrain.store.files import make_folder, write_atomically

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Batch:
    """What one sealed segment holds, as files that `posttrain.data.reading.tables.read` takes.

    Attributes:
        number: of the segment.
        files: by kind: ``labelled`` (prompt, completion), ``preferences`` (prompt, chosen, rejected), ``pool``
            (prompt). The same segment always gives the same names and bytes, so that adding it again changes nothing.
        counts: records by kind, and ``damaged`` for lines that do not match their checksum.
    """

    number: int
    files: Mapping[Kind, Path]
    counts: Mapping[str, int]
    mark: Path

    def rejected(self, kind: Kind) -> Path:
        """Where entries are set aside that cannot be used, each with its reason."""
        return self.mark.parent.parent / "rejected" / f"feedback-{self.mark.stem}-{kind}.jsonl"

    def done(self) -> None:
        """Say that the files' records are kept elsewhere: no later `drain` gives this segment again."""
        write_atomically(self.mark, b"")

    def tables(self, kind: Kind) -> Iterator[pa.Table]:
        """RECORD tables of one kind; none where there is none."""
        if kind in self.files:
            yield from read(self.files[kind], name=f"inbox/{self.files[kind].name}")


def drain(folder: Path, ratings: Ratings = Ratings()) -> list[Batch]:  # noqa: B008 - it is immutable
    """What an inbox holds by now and no batch before brought home, oldest first.

    Whoever dies before `Batch.done` gets the same batch again.

    Args:
        folder: the inbox's, such as ``.posttrain/inbox``.
        ratings: which numbers approve and which refuse.

    Raises:
        UserError: the disk refused, or the process that has the inbox open does not answer.
    """
    seal(folder)
    batches = []
    for segment in sealed(folder):
        mark = segment.with_suffix(".taken")
        if not mark.exists():
            batches.append(_batch(folder / "records", segment, mark, ratings))
    return batches


def _batch(records: Path, segment: Path, mark: Path, ratings: Ratings) -> Batch:
    lines = read_lines(segment.read_bytes())
    rows: dict[Kind, list[dict[str, Any]]] = {}
    unclear = 0
    for value in lines.values:
        kind, row = row_of(value["feedback"], value["received"], ratings)
        rows.setdefault(kind, []).append(row)
        rating = value["feedback"].get("rating")
        unclear += rating is not None and ratings.of(rating) is None
    for number in lines.damaged:
        log.warning("%s:%d: does not match its checksum; it is left out", segment, number)
    if unclear:
        rule = f"up from {ratings.up_from:g}, down to {ratings.down_to:g}"
        log.warning("%s: %d ratings are neither up nor down (%s): answers not known", segment, unclear, rule)
    make_folder(records)
    files = {}
    for kind in KINDS:
        if kind in rows:
            files[kind] = records / f"feedback-{segment.stem}-{kind}.jsonl"
            text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows[kind])
            write_atomically(files[kind], text.encode())
    counts: dict[str, int] = {kind: len(found) for kind, found in rows.items()}
    counts["damaged"] = len(lines.damaged)
    return Batch(int(segment.stem), files, counts, mark)
