"""Rows of a file in any format we read, each with its line; what cannot be read comes as a problem."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from posttrain.data.reading.arrow_rows import folder_rows, parquet_rows
from posttrain.data.reading.delimited_rows import DELIMITERS, delimited_rows
from posttrain.data.reading.json_rows import json_file, json_lines
from posttrain.data.reading.opening import lines, opened, problem_of
from posttrain.data.reading.paths import COMPRESSIONS, Place, file_format
from posttrain.data.reading.problem import Problem
from posttrain.data.reading.row import BadFile, Row, Rows
from posttrain.store.errors import UserError

__all__ = ["DELIMITERS", "READERS", "Row", "Rows", "rows", "uniform"]


def rows(path: Place, name: str) -> Rows:
    """Stream the rows of ``path``; after a problem the stream goes on where the format allows it.

    Args:
        path: a .jsonl, .json, .csv, .tsv or .parquet file, local or behind a URL, the first four also as .gz or
            .zst, or a local folder of .arrow files as ``datasets.Dataset.save_to_disk`` and the datasets cache
            write it.
        name: what problems call the file.
    """
    if problem := problem_of(path, name):
        yield problem
        return
    suffix = file_format(path)
    folder = isinstance(path, Path) and path.is_dir()
    reader = READERS.get(suffix)
    if not folder and reader is None:
        known = f"{', '.join(READERS)}, or one of them with {' or '.join(COMPRESSIONS)}"
        yield Problem(name, None, "unknown format", f"`{suffix}` is not a format we read", f"use one of {known}")
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


def uniform(path: Place) -> bool:
    """Whether all rows of the file have the same columns, so that a problem with columns is said once."""
    return (isinstance(path, Path) and path.is_dir()) or file_format(path) in (*DELIMITERS, ".parquet")


def _lines_of_json(path: Place, name: str) -> Rows:
    with opened(path, name) as file:
        yield from json_lines(lines(file, name), name)


READERS: dict[str, Callable[[Place, str], Rows]] = {
    ".jsonl": _lines_of_json,
    ".json": json_file,
    ".csv": delimited_rows,
    ".tsv": delimited_rows,
    ".parquet": parquet_rows,
}
