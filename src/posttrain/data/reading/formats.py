"""Reads the rows of a file by its format: CSV, TSV, Parquet and Arrow here, JSON in `json_rows`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from posttrain.data.reading.data_files import (
    COMPRESSIONS,
    DELIMITERS,
    MAX_LINE_BYTES,
    DataPath,
    access_problem,
    compression,
    file_format,
    open_file,
    read_lines,
)
from posttrain.data.reading.json_rows import json_file, json_lines
from posttrain.data.reading.rows import (
    BadFile,
    Problem,
    Rows,
    check_row,
    is_utf16,
    join_names,
    not_utf8_problem,
)
from posttrain.store.errors import UserError, shorten
from posttrain.store.text_files import DELIMITER_LINES, detect_delimiter, read_delimited

BATCH_ROWS = 1024


def read_rows(path: DataPath, name: str) -> Rows:
    """Streams the rows of a file; after a problem the stream continues where the format allows it.

    Args:
        path: a .jsonl, .json, .csv, .tsv or .parquet file, local or behind a URL, the first four also as .gz or
            .zst, or a local folder of .arrow files as ``datasets.Dataset.save_to_disk`` and the datasets cache
            write it.
        name: what problems call the file.
    """
    if problem := access_problem(path, name):
        yield problem
        return
    suffix = file_format(path)
    folder = isinstance(path, Path) and path.is_dir()
    reader = READERS.get(suffix)
    if not folder and reader is None:
        formats = f"{', '.join(READERS)}, or one of them with {' or '.join(COMPRESSIONS)}"
        yield Problem(name, None, "unknown format", f"`{suffix}` is not a format we read", f"use one of {formats}")
        return
    try:
        if isinstance(path, Path) and folder:
            yield from folder_rows(path, name)
        elif reader is not None:
            yield from reader(path, name)
    except BadFile as bad:
        yield bad.problem
    except UserError as error:
        yield Problem(name, None, "unreadable file", error.what, error.fix)
    except (pa.ArrowException, UnicodeDecodeError) as error:  # Arrow decodes the names of columns
        yield Problem(name, None, "damaged file", f"cannot be read: {str(error).splitlines()[0]}")
    except OSError as error:
        kind = "unreadable file" if error.strerror else "damaged file"
        yield Problem(name, None, kind, f"cannot be read: {error.strerror or error or 'it is damaged'}")


def _jsonl_rows(path: DataPath, name: str) -> Rows:
    with open_file(path, name) as file:
        yield from json_lines(read_lines(file, name), name)


def delimited_rows(path: DataPath, name: str) -> Rows:
    """Yields the rows of a .csv or .tsv file with a header."""
    with open_file(path, name) as file:
        lines = read_lines(file, name)
        start = list(islice(lines, DELIMITER_LINES))
        decoded = [line.decode("utf-8", errors="replace") for line in start]
        delimiter = detect_delimiter(decoded, DELIMITERS[file_format(path)])
        text = _DecodedLines(chain(start, lines), name, delimiter)
        header: list[str] | None = None
        for line, cells in read_delimited(text, delimiter):
            if isinstance(cells, str):
                fix = "quote fields that hold the delimiter" if header else None
                yield Problem(name, *text.explained(line, cells), fix)
                if header is None:
                    return
            elif header is not None:
                yield check_row(dict(zip(header, cells, strict=True)), name, line)
            else:
                header = cells
                if repeated := _repeated_column(header):
                    message = f"column `{shorten(repeated)}` stands in the header twice"
                    yield Problem(name, line, "repeated column", message)
                    return
            text.start_row()


def parquet_rows(path: DataPath, name: str) -> Rows:
    """Yields the rows of a .parquet file; an empty file has none."""
    if compression(path):
        fix = "decompress it; Parquet compresses by itself"
        yield Problem(name, None, "unknown format", "a compressed Parquet file cannot be read in pieces", fix)
        return
    with open_file(path, name) as source:
        # An empty file is not valid Parquet, but it is what some programs write for a table without rows.
        if not source.read(1):
            return
        source.seek(0)
        with pyarrow.parquet.ParquetFile(source) as file:
            # In batches, as a file may be larger than the memory.
            yield from batch_rows(file.iter_batches(BATCH_ROWS), name)


READERS: dict[str, Callable[[DataPath, str], Rows]] = {
    ".jsonl": _jsonl_rows,
    ".json": json_file,
    ".csv": delimited_rows,
    ".tsv": delimited_rows,
    ".parquet": parquet_rows,
}


class _DecodedLines:
    """Decodes lines, and keeps those of the current row for messages."""

    def __init__(self, lines: Iterator[bytes], name: str, delimiter: str) -> None:
        self._lines, self._name, self._delimiter = lines, name, delimiter
        self._row: list[str] = []
        self._size = 0
        self._read = 0
        self._start = 1

    def __iter__(self) -> Iterator[str]:
        for raw in self._lines:
            self._read += 1
            if self._read == 1 and is_utf16(raw):
                raise BadFile(not_utf8_problem(raw, self._name, 1))
            # Bytes that are not UTF-8 pass as lone surrogates, which `check_row` refuses, so only their row is lost.
            line = raw.decode("utf-8-sig" if self._read == 1 else "utf-8", errors="surrogateescape")
            self._row.append(line)
            self._size += len(raw)
            if self._size > MAX_LINE_BYTES:
                message = f"broken CSV: a row is longer than {MAX_LINE_BYTES:,} bytes, the most that is read"
                fix = "close the quote that opens here, or double a quote that belongs to the text"
                raise BadFile(Problem(self._name, self._quote(), "broken CSV", message, fix))
            yield line

    def start_row(self) -> None:
        """Drops the lines of the row that has been read."""
        self._row.clear()
        self._size = 0
        self._start = self._read + 1

    def explained(self, line: int, what: str) -> tuple[int, str, str]:
        """Explains an error in the row that begins on ``line``: the line to look at, the kind and the message."""
        if "new-line character" in what:
            what = "broken CSV: a carriage return ends no line here; save the file with line ends of Unix or Windows"
        elif what.startswith("broken CSV"):
            line = self._quote()
        elif len(self._row) > 1 and self._read > line:
            what += f", in a row that runs to line {self._read}; is the quote meant that opens on line {self._quote()}?"
        return line, "broken CSV", what

    def _quote(self) -> int:
        """Returns the 1-based line of the quote that never closes, or that closes in the middle of a field."""
        text = "".join(self._row)
        position = 0
        opening = 0
        while position < len(text):
            if text[position] == '"':
                opening = position
                position = self._closing(text, position)
                if position == len(text) or text[position] not in (self._delimiter, "\r", "\n"):
                    break
            ends = [end for mark in (self._delimiter, "\n") if (end := text.find(mark, position)) >= 0]
            position = min(ends, default=len(text)) + 1
        return self._start + text.count("\n", 0, opening)

    @staticmethod
    def _closing(text: str, opening: int) -> int:
        """Returns the position after the quoted field that opens there."""
        position = opening + 1
        while True:
            position = text.find('"', position) + 1
            if position == 0:
                return len(text)
            if not text.startswith('"', position):
                return position
            position += 1


def _repeated_column(header: list[str]) -> str | None:
    seen: set[str] = set()
    for cell in header:
        if cell in seen:
            return cell
        seen.add(cell)
    return None


def folder_rows(path: Path, name: str) -> Rows:
    """Yields the rows of a folder of .arrow files that Hugging Face `datasets` has saved."""
    splits = sorted(part.parent.name for part in path.glob("*/state.json"))
    if (path / "dataset_dict.json").exists() and splits:
        if len(splits) > 1:
            message = f"holds the splits {', '.join(splits)}"
            yield Problem(name, None, "several splits", message, f"name one of them, such as {name}/{splits[0]}")
            return
        # A single split needs no name.
        path = path / splits[0]
    files = _arrow_files(path)
    if not files:
        fix = "name a file, or a folder that `datasets` has saved"
        yield Problem(name, None, "no data files", "the folder holds no .arrow files", fix)
        return
    yield from batch_rows((batch for file in files for batch in _arrow_batches(file)), name)


def _arrow_files(folder: Path) -> list[Path]:
    """Returns the data files in order."""
    # save_to_disk lists them in state.json; a folder may also hold the cached results of maps, which are no data.
    state = folder / "state.json"
    if state.exists():
        try:
            names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
            return [folder / Path(name).name for name in names]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise pa.ArrowInvalid("state.json does not list the data files") from None
    return sorted(file for file in folder.glob("*.arrow") if not file.name.startswith(("cache-", "tmp")))


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        else:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)


def batch_rows(
    batches: Iterator[pa.RecordBatch], name: str, class_names: Mapping[str, Sequence[str]] | None = None
) -> Rows:
    """Yields the rows of Arrow batches; their lines count from 1.

    Args:
        class_names: names by which numbers of a column are read; None: those of the schema.
    """
    line = 0
    for batch in batches:
        class_labels = _class_labels(batch.schema) if class_names is None else class_names
        names = batch.schema.names
        if len(set(names)) < len(names):
            message = f"a column stands there twice; the columns are {join_names(names)}"
            yield Problem(name, 1, "repeated column", message)
            return
        try:
            # Without it a damaged file would crash the process in to_pylist, or give strings that are not UTF-8.
            batch.validate(full=True)
            values = batch.to_pylist(maps_as_pydicts="strict")
            for column, labels in class_labels.items():
                for row in values:
                    row[column] = _class_name(row[column], labels)
        except (ValueError, KeyError, OverflowError, pa.ArrowException) as error:
            message = f"a value of rows {line + 1:,} to {line + batch.num_rows:,} cannot be read: {error}"
            yield Problem(name, line + 1, "damaged file", message)
            return
        for row in values:
            line += 1
            yield check_row(row, name, line)


def _class_labels(schema: pa.Schema) -> dict[str, list[str]]:
    """Returns the names of the classes of each column with numbers, or lists of them, of a ``ClassLabel``."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        labels = {column: _class_names(feature) for column, feature in features.items() if column in schema.names}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}  # other programs have metadata, too
    return {
        column: names
        for column, names in labels.items()
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    }


def _class_names(feature: Any) -> Any:
    # Lists are `{"feature": ...}`, and lists of one feature in older files.
    inner = feature[0] if isinstance(feature, list) else feature.get("feature")
    return feature.get("names") if inner is None else inner.get("names")


def _class_name(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_class_name(item, names) for item in value]
    # -1 is what `datasets` writes for a class that is not known.
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None if value == -1 else value
