"""Rows of a file in any format we read, each with its line; what cannot be read comes as a problem."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from posttrain.data.problem import Problem
from posttrain.store.text import delimited

BATCH_ROWS = 1024
DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Row:
    """One record as the file holds it. ``line`` is 1-based: where a text record starts, or the row number."""

    line: int
    values: dict[str, Any]


Rows = Iterator[Row | Problem]


def rows(path: Path, name: str) -> Rows:
    """Stream the rows of ``path``; after a problem the stream goes on where the format allows it.

    Args:
        path: a .jsonl, .json, .csv, .tsv or .parquet file, or a folder of .arrow files as
            ``datasets.Dataset.save_to_disk`` and the datasets cache write it.
        name: what problems call the file.
    """
    if not path.exists():
        yield Problem(name, None, "missing file", "there is no such file", "check the path")
        return
    reader = _arrow_folder if path.is_dir() else READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(READERS)
        yield Problem(name, None, "unknown format", f"`{path.suffix}` is not a format we read", f"use one of {known}")
        return
    try:
        yield from reader(path, name)
    except OSError as error:
        yield Problem(name, None, "unreadable file", f"cannot be read: {error.strerror or error}")
    except pa.ArrowException as error:
        yield Problem(name, None, "damaged file", f"cannot be read: {str(error).splitlines()[0]}")


def uniform(path: Path) -> bool:
    """Whether all rows of the file have the same columns, so that a problem with columns is said once."""
    return path.is_dir() or path.suffix.lower() in (*DELIMITERS, ".parquet")


def _json_lines(path: Path, name: str) -> Rows:
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if raw.isspace():
                continue
            try:
                value = _parse(raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip())
            except UnicodeDecodeError:
                yield _not_utf8(raw, name, line)
                if _utf16(raw):
                    return
                continue
            except (ValueError, RecursionError) as error:
                yield _broken_json(error, name, line)
                continue
            yield _row(value, name, line)


def _json(path: Path, name: str) -> Rows:
    """A .json file holds one array of objects, or one object a line."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield _not_utf8(raw, name, raw.count(b"\n", 0, error.start) + 1)
        return
    if not text.lstrip().startswith("["):
        yield from _json_lines(path, name)
        return
    position, line = text.index("[") + 1, 1
    counted = 0
    while True:
        position = _skip_space(text, position)
        line, counted = line + text.count("\n", counted, position), position
        if text.startswith("]", position):
            if text[position + 1 :].strip():
                yield Problem(name, line, "broken JSON", "something follows the end of the array")
            return
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield _broken_json(error, name, getattr(error, "lineno", line))
            return
        yield _row(value, name, line)
        position = _skip_space(text, position)
        if text.startswith(",", position):
            position += 1
        elif not text.startswith("]", position):
            line += text.count("\n", counted, position)
            yield Problem(name, line, "broken JSON", "broken JSON: `,` or `]` expected after a record")
            return


def _delimited(path: Path, name: str) -> Rows:
    """CSV with a header. Undecodable bytes pass as lone surrogates, so that only their own row is refused."""
    with path.open("rb") as file:
        if _utf16(file.read(2)):
            yield _not_utf8(b"\xff\xfe", name, 1)
            return
        file.seek(0)
        lines = (
            raw.decode("utf-8-sig" if line == 0 else "utf-8", errors="surrogateescape") for line, raw in enumerate(file)
        )
        header: list[str] | None = None
        for line, cells in delimited(lines, DELIMITERS[path.suffix.lower()]):
            if isinstance(cells, str):
                fix = "quote fields that hold the delimiter" if header else None
                yield Problem(name, line, "broken CSV", cells, fix)
                if header is None:
                    return
            elif header is not None:
                yield _row(dict(zip(header, cells, strict=True)), name, line)
            else:
                header = cells
                if repeated := next((cell for cell in header if header.count(cell) > 1), None):
                    yield Problem(name, line, "repeated column", f"column `{repeated}` stands in the header twice")
                    return


def _parquet(path: Path, name: str) -> Rows:
    if path.stat().st_size == 0:
        return
    with pyarrow.parquet.ParquetFile(path) as file:
        yield from _batches(file.iter_batches(BATCH_ROWS), name)


def _arrow_folder(path: Path, name: str) -> Rows:
    splits = sorted(part.parent.name for part in path.glob("*/state.json"))
    if (path / "dataset_dict.json").exists() and splits:
        if len(splits) > 1:
            message = f"holds the splits {', '.join(splits)}"
            yield Problem(name, None, "several splits", message, f"name one of them, such as {name}/{splits[0]}")
            return
        path = path / splits[0]
    files = _arrow_files(path)
    if not files:
        fix = "name a file, or a folder that `datasets` has saved"
        yield Problem(name, None, "no data files", "the folder holds no .arrow files", fix)
        return
    yield from _batches((batch for file in files for batch in _arrow_batches(file)), name)


def _arrow_files(folder: Path) -> list[Path]:
    """The data files in order; ``state.json`` of save_to_disk lists them, which leaves cached maps out."""
    state = folder / "state.json"
    if state.exists():
        try:
            names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
            return [folder / Path(name).name for name in names]
        except (ValueError, KeyError, TypeError):
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


def _batches(batches: Iterator[pa.RecordBatch], name: str) -> Rows:
    line = 0
    for batch in batches:
        for values in batch.to_pylist():
            line += 1
            yield _row(values, name, line)


def _row(value: Any, name: str, line: int) -> Row | Problem:
    if not isinstance(value, dict):
        return Problem(name, line, "not an object", "a record must be a JSON object")
    if not _encodable(value):
        return Problem(name, line, "encoding", "holds bytes or characters that are not UTF-8", "save the file as UTF-8")
    return Row(line, value)


def _encodable(value: Any) -> bool:
    """Whether all strings can be stored; a lone surrogate cannot."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, dict):
        return all(_encodable(key) and _encodable(inner) for key, inner in value.items())
    return all(map(_encodable, value)) if isinstance(value, list) else True


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"`{constant}` is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_parse = _DECODER.decode


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _broken_json(error: Exception, name: str, line: int) -> Problem:
    if isinstance(error, RecursionError):
        message = "nested too deeply"
    elif isinstance(error, json.JSONDecodeError):
        message = f"{error.msg} (column {error.colno})"
    else:
        message = str(error)
    return Problem(name, line, "broken JSON", f"broken JSON: {message}")


def _utf16(raw: bytes) -> bool:
    return raw[:2] in (b"\xff\xfe", b"\xfe\xff")


def _not_utf8(raw: bytes, name: str, line: int) -> Problem:
    message = "the file is UTF-16, not UTF-8" if _utf16(raw) else "holds bytes that are not UTF-8"
    return Problem(name, line, "encoding", message, "save the file as UTF-8")


READERS: dict[str, Callable[[Path, str], Rows]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _delimited,
    ".tsv": _delimited,
    ".parquet": _parquet,
}
