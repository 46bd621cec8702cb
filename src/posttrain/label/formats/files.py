"""Reads the records of a file: elements of one JSON array, JSON lines, or rows of CSV."""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from posttrain.store.errors import UserError
from posttrain.store.paths import check_path
from posttrain.store.text_files import DELIMITER_LINES, detect_delimiter, read_delimited, reject_constant, unique_pairs

MAX_DEPTH = 100

_SPACE = re.compile(r"[ \t\r\n]*")
# An escape of NUL or of half a surrogate pair; most records have none, and need no look at each of their texts.
_SUSPICIOUS = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_DECODER = json.JSONDecoder(object_pairs_hook=unique_pairs, parse_constant=reject_constant)
_FORMULA = ("=", "+", "-", "@")


class FileRecord(NamedTuple):
    """A record of a file, and its place in errors: ``tasks.json, record 3`` or ``batch.csv:7``."""

    where: str
    value: dict[str, Any]


def read_json_records(path: Path, name: str) -> Iterator[FileRecord]:
    """Yields the objects of a file of JSON: of one array, whose text is read whole, or one per line.

    Args:
        name: The file's name in errors.

    Raises:
        UserError: the file cannot be read, or a record is not a JSON object that can be stored.
    """
    with _open(path, name) as file:
        start = _SPACE.sub("", _read(file, 4096, name), count=1)
        if not start:
            raise UserError("the file is empty", where=name)
    reader = _read_array if start.startswith("[") else _read_lines
    with _open(path, name) as file:
        yield from reader(file, name)


def read_csv_records(path: Path, name: str) -> Iterator[FileRecord]:
    """Yields the rows of a CSV file by column.

    Raises:
        UserError: the file cannot be read, or a row does not fit its header.
    """
    with _open(path, name) as file:
        for line, row in csv_rows(_checked_lines(file, name), name):
            _check_value(row, f"{name}:{line}", 1)
            yield FileRecord(f"{name}:{line}", row)


def csv_rows(
    lines: Iterable[str], name: str, needed: Sequence[str] = (), fix: str | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of CSV text by column, with the line of each; the delimiter is a comma, a semicolon or a tab.

    Args:
        lines: Lines with their ends.
        name: The file's name in errors.
        needed: Columns that must be there.
        fix: What to do about a file without a line.

    Raises:
        UserError: there is no line, a needed column is missing, or a row does not fit the header.
    """
    lines = iter(lines)
    if not (start := list(islice(lines, DELIMITER_LINES))):
        raise UserError("the file is empty", where=name, fix=fix)
    delimiter = detect_delimiter(start)
    header: list[str] | None = None
    for line, cells in read_delimited(chain(start, lines), delimiter, blank=False):
        where = f"{name}:{line}"
        if isinstance(cells, str):
            raise UserError(cells, where=where)
        if header is None:
            header = [cell.strip() for cell in cells]
            for column in (*needed, *header):
                if header.count(column) != 1:
                    number = "more than one" if column in header else "no"
                    listed = ", ".join(header)
                    raise UserError(f"there is {number} column `{column}`; the columns are {listed}", where=where)
        else:
            yield line, dict(zip(header, cells, strict=True))


def escape_cell(cell: str) -> str:
    """Returns a cell that no spreadsheet takes for a formula; an import takes the apostrophe away again."""
    return f"'{cell}" if _is_formula(cell) else cell


def plain_cell(cell: str) -> str:
    """Returns the text of a cell that `escape_cell` has escaped."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell) else cell


def _is_formula(cell: str) -> bool:
    # Behind apostrophes of its own too, so that the two stay apart.
    text = cell.lstrip("'")
    # Spreadsheets pass over white space, and some read the full-width and small forms of a sign.
    sign = unicodedata.normalize("NFKC", text.lstrip()[:1])
    return text.startswith(("\t", "\r", "\n")) or sign.startswith(_FORMULA)


def to_json(value: Any) -> str:
    """Returns JSON on one line; equal values with equal orders of keys give equal text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half a surrogate pair, which JSON can hold as an escape and UTF-8 cannot hold at all.
        return json.dumps(value, allow_nan=False)
    return text


def _open(path: Path, name: str) -> IO[str]:
    check_path(path, name)
    try:
        # Line ends stay as they are, since a text may hold each of them.
        return path.open(encoding="utf-8-sig", newline="")
    except FileNotFoundError:
        raise UserError("there is no such file", where=name, fix="check the path") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=name) from None


def _read(file: IO[str], count: int, where: str) -> str:
    try:
        return file.read(count)
    except UnicodeDecodeError:
        raise UserError("holds bytes that are not UTF-8", where=where, fix="save as UTF-8") from None


def _checked_lines(file: IO[str], name: str) -> Iterator[str]:
    line = 0
    try:
        for text in file:
            line += 1
            yield text
    except UnicodeDecodeError:
        raise UserError("holds bytes that are not UTF-8", where=f"{name}:{line + 1}", fix="save as UTF-8") from None


def _read_lines(file: IO[str], name: str) -> Iterator[FileRecord]:
    for line, text in enumerate(_checked_lines(file, name), 1):
        where = f"{name}:{line}"
        if text.isspace():
            continue
        try:
            value = _DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            raise _broken_json(error, where) from None
        yield _checked_record(value, text, where)


def _read_array(file: IO[str], name: str) -> Iterator[FileRecord]:
    text = _read(file, -1, name)
    position, number, separator = text.index("["), 0, "["
    while separator != "]":
        number += 1
        where = f"{name}, record {number}"
        position = _skip(text, position + 1)
        if number == 1 and text.startswith("]", position):
            break
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _broken_json(error, where) from None
        yield _checked_record(value, text[position:end], where)
        position = _skip(text, end)
        separator = text[position : position + 1]
        if separator not in (",", "]"):
            what = "`,` or `]` expected" if separator else "the array never closes"
            raise UserError(f"broken JSON: {what}", where=f"{name}, record {number + 1}")
    if text[position + 1 :].strip():
        raise UserError("something follows the end of the array", where=name)


def _skip(text: str, position: int) -> int:
    """Returns the position of the next character that is not a space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _checked_record(value: Any, text: str, where: str) -> FileRecord:
    if not isinstance(value, dict):
        raise UserError("a record must be a JSON object", where=where)
    # Few brackets cannot nest deeply.
    if _SUSPICIOUS.search(text) or text.count("{") + text.count("[") >= MAX_DEPTH:
        _check_value(value, where, 1)
    return FileRecord(where, value)


def _check_value(value: Any, where: str, level: int) -> None:
    """Refuses what no database or tokenizer takes: NUL, half a surrogate pair, a nesting that no recursion follows."""
    if isinstance(value, str):
        if "\0" in value:
            raise UserError("holds a NUL character, which is not text", where=where, fix="take it out")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(
                "holds half a surrogate pair, which is not a character", where=where, fix="take it out"
            ) from None
    elif isinstance(value, dict | list):
        if level > MAX_DEPTH:
            raise UserError(f"nested too deeply (over {MAX_DEPTH} levels)", where=where)
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_value(inner, where, level + 1)


def _broken_json(error: Exception, where: str) -> UserError:
    if isinstance(error, RecursionError):
        return UserError(f"nested too deeply (over {MAX_DEPTH} levels)", where=where)
    message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return UserError(f"broken JSON: {message}", where=where)
