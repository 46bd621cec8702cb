"""From a file in any accepted format and shape to tables of RECORD."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from posttrain.data.reading.conversion import Conversion, Record, turns_in
from posttrain.data.reading.files import DELIMITERS, rows, uniform
from posttrain.data.reading.opening import problem_of
from posttrain.data.reading.paths import Place, file_format, place
from posttrain.data.reading.problem import Problem
from posttrain.data.reading.row import Row
from posttrain.data.records.schema import records

__all__ = ["BATCH_RECORDS", "Record", "read", "read_rows", "scan", "turns_in"]

BATCH_RECORDS = 8192

Skip = Callable[[Problem], None]


def read(
    path: str | Path | Place,
    columns: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
    batch: int = BATCH_RECORDS,
    skipped: Skip | None = None,
) -> Iterator[pa.Table]:
    """Stream a file as tables of RECORD with up to ``batch`` rows, in file order.

    Args:
        path: .jsonl, .json, .csv, .tsv (each also as .gz or .zst) or .parquet, local or behind a URL such as
            ``s3://bucket/key``, or a local Hugging Face dataset folder.
        columns: which column holds what, such as ``{"prompt": "text", "completion": "category"}``.
        name: what ``source`` and errors call the file; ``path`` as given when None.
        answers: whether a mapped ``completion`` column must be there (a pool may lack it).
        skipped: called with the problem of each record that is left out, such as a failed request of a log.

    Raises:
        UserError: at once if there is no such file; on the first bad record, with file and line; the file holds no
            records.
    """
    if problem := problem_of(place(path), str(path) if name is None else name):
        raise problem.error()
    found = scan(path, columns, name=name, answers=answers)
    return _tables(found, batch, skipped)


def read_rows(
    rows: Iterable[Row | Problem],
    conversion: Conversion,
    *,
    batch: int = BATCH_RECORDS,
    skipped: Skip | None = None,
) -> Iterator[pa.Table]:
    """Tables of RECORD of some of a file's rows; none when there are none.

    Args:
        conversion: afterwards it knows the shape of the records.

    Raises:
        UserError: on the first bad record, with file and line.
    """
    return _tables(conversion(rows), batch, skipped)


def scan(
    path: str | Path | Place,
    columns: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
) -> Iterator[Record | Problem]:
    """Every record of a file, and a problem in the place of each bad one; the arguments of :func:`read`."""
    source = str(path) if name is None else name
    where = place(path)
    cells = file_format(where) in DELIMITERS
    conversion = Conversion(source, columns, answers=answers, cells=cells, same_columns=uniform(where))
    refused = left_out = 0
    for found in conversion(rows(where, source)):
        if isinstance(found, Problem):
            refused += found.blocking
            left_out += not found.blocking
        yield found
    if conversion.records or refused:
        return
    if left_out:
        message, fix = f"none of the {left_out:,} records can be used", "name another file"
    else:
        message, fix = "the file holds no records", "put records into it, or name another file"
    yield Problem(source, None, "empty file", message, fix)


def _tables(found: Iterable[Record | Problem], batch: int, skipped: Skip | None) -> Iterator[pa.Table]:
    waiting: list[Record] = []
    for one in found:
        if isinstance(one, Problem):
            if one.blocking:
                raise one.error()
            if skipped is not None:
                skipped(one)
            continue
        waiting.append(one)
        if len(waiting) == batch:
            yield records(waiting)
            waiting = []
    if waiting:
        yield records(waiting)
