"""Cuts files into pieces that workers read in parallel, each identified by its content."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from posttrain.data.reading.conversion import RecordConverter, record_tables, require_known_labels
from posttrain.data.reading.data_files import (
    DELIMITERS,
    DataPath,
    file_format,
    has_fixed_columns,
    read_line_range,
    to_data_path,
)
from posttrain.data.reading.formats import read_rows
from posttrain.data.reading.json_rows import json_lines
from posttrain.data.reading.rows import COLUMN_KINDS, Problem, Row, unknown_label_problem
from posttrain.data.records.record import REJECTED, concat
from posttrain.store.errors import UserError

MAX_PIECE_BYTES = 16 << 20

MIN_PIECE_BYTES = 1 << 20

PIECE_ROWS = 16_384  # parsed rows are pickled to the worker, so their number is bounded, too

BLOCK_BYTES = 1 << 20  # that are read at a time; a piece ends in the first line end of a block


@dataclass(frozen=True)
class Piece:
    """Consecutive lines of one file. Each cut depends only on the content before it, so a grown file keeps its pieces.

    Attributes:
        name: the file as the user named it.
        path: its path or URL.
        first_line: 1-based.
        digest: SHA-256 of the content, 64 hex characters.
        start, stop: byte range of a plain JSONL file, which each worker reads by itself.
        rows: the parsed rows of any other file, which can only be read from its start.
    """

    name: str
    path: str
    first_line: int
    digest: str
    start: int = 0
    stop: int = 0
    rows: tuple[Row | Problem, ...] | None = None

    def described(self) -> dict[str, Any]:
        """Returns the identity of the piece as JSON values."""
        return {"name": self.name, "first_line": self.first_line, "digest": self.digest}


def pieces(path: DataPath, name: str) -> Iterator[Piece]:
    """Cuts a file into pieces.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    if isinstance(path, Path) and path.suffix.lower() == ".jsonl" and path.is_file():
        try:
            yield from _byte_ranges(path, name)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=name) from None
    else:
        yield from _row_batches(path, name)


def _byte_ranges(path: Path, name: str) -> Iterator[Piece]:
    """Yields ranges of whole lines; a line longer than a piece is a range by itself."""
    start, line, first_line, length = 0, 1, 1, 0
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            rest = memoryview(block)
            if length and length + len(block) >= _target_bytes(start) and (end := block.find(b"\n")) >= 0:
                # Only the content before a cut decides where it is: appending to a file leaves its earlier pieces as
                # they are.
                head, rest = rest[: end + 1], rest[end + 1 :]
                digest.update(head)
                length += len(head)
                line += 1
                yield Piece(name, str(path), first_line, digest.hexdigest(), start, start + length)
                start, first_line, length, digest = start + length, line, 0, hashlib.sha256()
            digest.update(rest)
            length += len(rest)
            line += bytes(rest).count(b"\n")
    if length or not start:
        yield Piece(name, str(path), first_line, digest.hexdigest(), start, start + length)


def _row_batches(path: DataPath, name: str) -> Iterator[Piece]:
    waiting: list[Row | Problem] = []
    size, before, digest, cut = 0, 0, hashlib.sha256(), False

    def piece() -> Piece:
        first = waiting[0].line if waiting else 1
        return Piece(name, str(path), first or 1, digest.hexdigest(), rows=tuple(waiting))

    for row in read_rows(path, name):
        waiting.append(row)
        content = json.dumps(row.values, default=str, ensure_ascii=False) if isinstance(row, Row) else repr(row)
        encoded = content.encode("utf-8", "surrogatepass")
        # The line end keeps two rows apart from one row that holds both texts.
        digest.update(encoded + b"\n")
        size += len(encoded)
        if len(waiting) == PIECE_ROWS or size >= _target_bytes(before):
            yield piece()
            waiting, size, before, digest, cut = [], 0, before + size, hashlib.sha256(), True
    if waiting or not cut:  # a file without rows is one piece, so that it is known to be empty
        yield piece()


def _target_bytes(before: int) -> int:
    """Returns the size of the next piece, given the bytes before it."""
    # Small pieces first: with pieces of 16 MiB from the start a small file would occupy one process alone.
    return min(max(before // 4, MIN_PIECE_BYTES), MAX_PIECE_BYTES)


@dataclass(frozen=True)
class PieceRecords:
    """The records of one piece.

    Attributes:
        records: RECORD table.
        shape: shape of the records; None where there are none.
        left_out: number of skipped rows by kind, such as the failed requests of a log.
        user_ids: `posttrain.data.reading.conversion.UserIds.table`.
        unreadable: REJECTED table of the records that could not be read, where these are skipped; among ``left_out``.
    """

    records: pa.Table
    shape: str | None
    left_out: dict[str, int]
    user_ids: pa.Table
    unreadable: pa.Table


def read_piece(
    piece: Piece, columns: Mapping[str, str] | None, labels: Sequence[str] = (), *, skip_errors: bool = False
) -> PieceRecords:
    """Reads the records of a piece.

    Args:
        labels: the closed label set; empty for open-ended answers.
        skip_errors: whether a record that cannot be read is left out, with its reason, and the others are read. A fault
            of the whole file, such as a missing column of a CSV, stays an error.

    Raises:
        UserError: on the first bad record, with file and line.
    """
    path = to_data_path(piece.path)
    cells = file_format(path) in DELIMITERS
    # Answers may be missing here: the same file may serve as a pool. Steps decide about records without one.
    fixed = has_fixed_columns(path)
    conversion = RecordConverter(piece.name, columns, answers=False, cells=cells, same_columns=fixed)
    left_out: Counter[str] = Counter()
    unreadable: list[dict[str, Any]] = []

    def skipped(problem: Problem) -> None:
        left_out[problem.kind] += 1
        if problem.blocking:
            unreadable.append(_rejection(problem))

    rows: Iterable[Row | Problem]
    if piece.rows is not None:
        rows = piece.rows
    else:
        rows = json_lines(read_line_range(piece.path, piece.start, piece.stop), piece.name, piece.first_line)
    skippable = (lambda problem: not _is_of_file(problem, fixed)) if skip_errors else None
    table = concat(list(record_tables(conversion(rows), skipped=skipped, skippable=skippable)))
    if labels and skip_errors:
        known = pa.compute.is_in(table["completion"], value_set=pa.array([None, *labels], pa.string()))
        for row in table.filter(pa.compute.invert(known)).to_pylist():
            problem = unknown_label_problem(row["completion"], labels, row["source"], row["line"])
            left_out[problem.kind] += 1
            unreadable.append({**_rejection(problem), **row})
        table = table.filter(known)
    elif labels:
        require_known_labels(table, labels)
    return PieceRecords(
        table,
        conversion.shape.name if conversion.shape else None,
        dict(left_out),
        conversion.user_ids.table(),
        pa.Table.from_pylist(unreadable, schema=REJECTED),
    )


def _is_of_file(problem: Problem, fixed_columns: bool) -> bool:
    """Returns whether a problem is one of the whole file, whose other records cannot be read either."""
    return problem.line is None or (fixed_columns and problem.kind in COLUMN_KINDS)


def _rejection(problem: Problem) -> dict[str, Any]:
    """Returns a REJECTED row for a record that could not be read: identified by file and line, as it has no content."""
    id = hashlib.sha256(f"{problem.file}:{problem.line}".encode()).hexdigest()[:20]
    detail = f"{problem.message}; {problem.fix}" if problem.fix else problem.message
    origin = {"source": problem.file, "line": problem.line}
    return {"id": id, "input_id": id, **origin, "meta": "{}", "step": "read", "reason": problem.kind, "detail": detail}
