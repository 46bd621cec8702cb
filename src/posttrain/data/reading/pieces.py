"""Files in pieces: what one task reads, known by its content."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.reading.files import Row, rows
from posttrain.data.reading.paths import Place
from posttrain.data.reading.problem import Problem
from posttrain.store.errors import UserError

PIECE_BYTES = 16 << 20
LEAST_PIECE_BYTES = 1 << 20
PIECE_ROWS = 16_384
BLOCK_BYTES = 1 << 20  # that are read at a time; a piece ends in the first line end of a block


@dataclass(frozen=True)
class Piece:
    """Some neighbouring lines of one file; where a file is cut depends on its content from the start up to there.

    Attributes:
        name: the file as the user named it.
        path: where it lies.
        first_line: 1-based.
        digest: SHA-256 of the content, 64 hex characters.
        start, stop: bytes of the file, where it is a plain JSONL file; every worker reads its own.
        rows: what the lines hold, where a file can only be read from its start.
    """

    name: str
    path: str
    first_line: int
    digest: str
    start: int = 0
    stop: int = 0
    rows: tuple[Row | Problem, ...] | None = None

    def described(self) -> dict[str, Any]:
        """What tells the piece from all others, as JSON values."""
        return {"name": self.name, "first_line": self.first_line, "digest": self.digest}


def pieces(path: Place, name: str) -> Iterator[Piece]:
    """Cut a file.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    if isinstance(path, Path) and path.suffix.lower() == ".jsonl" and path.is_file():
        try:
            yield from _ranges(path, name)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=name) from None
    else:
        yield from _batches(path, name)


def _ranges(path: Path, name: str) -> Iterator[Piece]:
    """Ranges of whole lines; a line that is longer than a piece is a range by itself."""
    start, line, first_line, length = 0, 1, 1, 0
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            rest = memoryview(block)
            if length and length + len(block) >= _wanted(start) and (end := block.find(b"\n")) >= 0:
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


def _batches(path: Place, name: str) -> Iterator[Piece]:
    waiting: list[Row | Problem] = []
    size, before, digest, cut = 0, 0, hashlib.sha256(), False

    def piece() -> Piece:
        first = waiting[0].line if waiting else 1
        return Piece(name, str(path), first or 1, digest.hexdigest(), rows=tuple(waiting))

    for row in rows(path, name):
        waiting.append(row)
        content = json.dumps(row.values, default=str, ensure_ascii=False) if isinstance(row, Row) else repr(row)
        encoded = content.encode("utf-8", "surrogatepass")
        digest.update(encoded + b"\n")
        size += len(encoded)
        if len(waiting) == PIECE_ROWS or size >= _wanted(before):
            yield piece()
            waiting, size, before, digest, cut = [], 0, before + size, hashlib.sha256(), True
    if waiting or not cut:  # a file without rows is one piece, so that it is known to be empty
        yield piece()


def _wanted(before: int) -> int:
    """Bytes of a piece with so many before it: small ones first, so that a file of any length keeps processes busy."""
    return min(max(before // 4, LEAST_PIECE_BYTES), PIECE_BYTES)
