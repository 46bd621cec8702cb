"""Reads UTF-8 text, delimited files and strict JSON that users wrote, and normalises text for comparisons."""

import csv
import math
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from posttrain.store.errors import UserError, shorten
from posttrain.store.paths import check_path

DELIMITER_LINES = 8
"""Lines of a file by which its delimiter is detected."""


def read_text(path: Path, name: str) -> str:
    """Reads a UTF-8 file, without the byte order mark that spreadsheets put before the text.

    Args:
        name: The file's name in errors.

    Raises:
        UserError: it is missing, cannot be read or is not UTF-8, with the line.
    """
    check_path(path, name)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError("there is no such file", where=name, fix="check the path") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=name) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError("holds bytes that are not UTF-8", where=f"{name}:{line}", fix="save as UTF-8") from None


def finite_json(value: Any) -> Any:
    """Returns JSON values in which NaN and infinity are None, at any depth: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: finite_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def normalise_text(text: str) -> str:
    """Applies NFC, strips, and collapses each run of whitespace to one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def normalise_lines(text: str) -> str:
    """Normalises a text for comparisons in which whitespace counts if there are several lines, as in a program.

    Only the forms of Unicode and of line ends, and whitespace at the end of the text, do not count there.
    """
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n")).rstrip().lstrip("\n")
    return text if "\n" in text else normalise_text(text)


def detect_delimiter(lines: Sequence[str], usual: str = ",") -> str:
    """Returns the delimiter by which the first lines of a file have equally many columns, the usual one if it can be.

    Spreadsheets save with a semicolon or a tab in many locales, whatever the suffix. Where rows fit the header by none,
    it is the one that the header has most of: its names could hardly hold one by chance.

    Args:
        lines: The first `DELIMITER_LINES` lines, or all of a shorter file.
        usual: The delimiter of the file's format.
    """
    delimiters = (usual, *(other for other in ",;\t" if other != usual))
    for delimiter in delimiters:
        rows = [cells for _, cells in read_delimited(lines, delimiter)]
        # The last row may span more lines than these.
        whole = rows[:-1] if len(lines) == DELIMITER_LINES and len(rows) > 1 else rows
        if rows and len(rows[0]) > 1 and all(isinstance(cells, list) for cells in whole):
            return delimiter
    return max(delimiters, key=lines[0].count) if lines else usual


def read_delimited(
    lines: Iterable[str], delimiter: str, *, blank: bool = True
) -> Iterator[tuple[int, list[str] | str]]:
    """Yields the rows of delimited text, each with the 1-based line that it begins on; skips empty lines.

    The first row is the header. A row that cannot be read, or is not as long as the header, is yielded as a text that
    describes the problem.

    Args:
        lines: Lines with their ends.
        delimiter: One character between fields.
        blank: True if rows of nothing but empty fields count; spreadsheets append such rows, of any length.
    """
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is less than many a document
    # Strict: else a quote that never closes would swallow the rest of the file as one field, without an error.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    width: int | None = None
    while True:
        # Before the row: a quoted field may span lines, and afterwards `line_num` is that of its last one.
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            what = "a quoted field never closes" if "end of data" in str(error) else str(error)
            yield line, f"broken CSV: {what}"
            continue
        if cells is None:
            return
        if not cells or not (blank or any(cell.strip() for cell in cells)):
            continue
        width = width or len(cells)
        yield line, cells if len(cells) == width else f"{len(cells)} fields where the header names {width}"


def reject_constant(constant: str) -> NoReturn:
    """Refuses NaN and Infinity, as the ``parse_constant`` of a decoder: no other reader of JSON accepts them."""
    raise ValueError(f"`{constant}` is not JSON")


class RepeatedKey(ValueError):
    """Raised for a key that occurs twice in one object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key `{shorten(key)}` occurs twice in one object")
        self.key = key


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object from its pairs, as the ``object_pairs_hook`` of a decoder.

    Raises:
        RepeatedKey: a key occurs twice; Python's decoder would silently drop its first value.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        # Counted: to compare each key with all before it would take minutes for an object of a megabyte.
        raise RepeatedKey(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return values
