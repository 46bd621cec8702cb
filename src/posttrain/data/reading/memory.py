"""Reads records that a program holds: dictionaries, Arrow tables, DataFrames and ``datasets.Dataset``."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.data.reading.conversion import AnswerReader, OnSkipped, Record, RecordConverter, record_tables
from posttrain.data.reading.formats import BATCH_ROWS, batch_rows
from posttrain.data.reading.rows import COLUMN_KINDS, Problem, Row, Rows, check_row
from posttrain.store.errors import UserError

_KINDS = "a list of dictionaries, an Arrow table, a DataFrame, a datasets.Dataset, or files"

# pandas writes an index without a name under such a name.
_INDEX = "__index_level_"


def read_memory(
    data: Any,
    name: str,
    columns: Mapping[str, str] | None = None,
    *,
    read_answer: AnswerReader | None = None,
    skipped: OnSkipped | None = None,
    unused: Callable[[list[str]], None] | None = None,
) -> Iterator[pa.Table]:
    """Streams records that a program holds as RECORD tables, as `posttrain.data.reading.reader.read` does a file's.

    Neither pandas nor polars nor ``datasets`` is imported: a table is whatever gives an Arrow stream
    (``__arrow_c_stream__``), and a ``datasets.Dataset`` whatever has ``with_format`` and ``iter``.

    Args:
        data: an iterable of dictionaries, a table, a DataFrame or a ``datasets.Dataset``.
        name: what the caller calls it, such as ``data``: the ``source`` of its records, whose ``line`` counts from 1.
        columns: column of each field, such as ``{"prompt": "question"}``.
        read_answer: reads answers, as `read` takes it.
        skipped: called with the problem of each record that is skipped, such as a failed request of a log.
        unused: called at the end with the columns that only ``meta`` keeps.

    Raises:
        UserError: it is none of these, holds no records, or a record is bad; names the record's index, from 0.
    """
    rows = _rows(data, name)
    # A problem with the columns of a table is one of the whole table.
    fixed = _is_table(data) or hasattr(data, "with_format")

    locate = partial(record_index, name)

    def items() -> Iterator[Record | Problem]:
        conversion = RecordConverter(name, columns, same_columns=fixed, read_answer=read_answer, locate=locate)
        for item in conversion(rows):
            if isinstance(item, Problem):
                of_all = item.line is None or (fixed and item.kind in COLUMN_KINDS)
                where = name if of_all else locate(item.line or 1)
                if item.blocking:
                    raise UserError(item.message, where=where, fix=item.fix)
                item = replace(item, file=where, line=None)
            yield item
        if unused is not None:
            unused(list(conversion.unused))
        if not conversion.records:
            raise UserError("holds no records that can be used", where=name, fix="put records into it")

    return record_tables(items(), skipped=skipped)


def record_index(name: str, line: int) -> str:
    """Returns how Python names a record by its line: ``data[3]`` for line 4."""
    return f"{name}[{line - 1}]"


def _is_table(data: Any) -> bool:
    return hasattr(data, "__arrow_c_stream__") or _is_pandas(data)


def _is_pandas(data: Any) -> bool:
    return hasattr(data, "iloc") and hasattr(data, "columns")


def _rows(data: Any, name: str) -> Rows:
    """Yields the rows of any accepted object; their lines count from 1."""
    if isinstance(data, Mapping):
        if any(hasattr(part, "with_format") for part in data.values()):
            splits = [str(key) for key in data]
            fix = f"name one of them, such as {name}[{splits[0]!r}]"
            raise UserError(f"holds the splits {', '.join(splits)}", where=name, fix=fix)
        raise UserError("is one dictionary", where=name, fix=f"give {_KINDS}")
    if hasattr(data, "with_format") and hasattr(data, "iter"):
        tables = data.with_format("arrow").iter(batch_size=BATCH_ROWS)
        features = getattr(data, "features", None) or {}
        inner = {
            column: feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
            for column, feature in features.items()
        }
        classes = {column: feature.names for column, feature in inner.items() if hasattr(feature, "names")}
        return batch_rows((batch for table in tables for batch in table.to_batches()), name, classes or None)
    if _is_table(data):
        return batch_rows(iter(_to_table(data, name).to_batches(BATCH_ROWS)), name)
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        fix = "call its collect()" if hasattr(data, "collect") else f"give {_KINDS}"
        raise UserError(f"{type(data).__name__} holds no records that can be read", where=name, fix=fix)
    return _dictionary_rows(data, name)


def _to_table(data: Any, name: str) -> pa.Table:
    try:
        # Not by its Arrow stream: that of pandas has the index as a column.
        table = pa.Table.from_pandas(data) if _is_pandas(data) else pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        what = f"cannot be read as an Arrow table: {str(error).splitlines()[0]}"
        raise UserError(what, where=name, fix="give every column values of one type") from None
    return table.select([column for column in table.column_names if not column.startswith(_INDEX)])


def _dictionary_rows(data: Iterable[Any], name: str) -> Rows:
    for line, record in enumerate(data, 1):
        if not isinstance(record, Mapping):
            where = record_index(name, line)
            raise UserError(f"a record must be a dictionary, not {type(record).__name__}", where=where)
        row = check_row(_plain(record), name, line)
        # Keys that are not text have no counterpart in a file of JSON lines.
        if isinstance(row, Row) and not all(isinstance(key, str) for key in record):
            key = next(key for key in record if not isinstance(key, str))
            row = Problem(name, line, "not text", f"the key {key!r} is not text", "use texts as keys")
        yield row


def _plain(value: Any) -> Any:
    """Converts mappings, tuples and NumPy values to the types that JSON gives."""
    if type(value) is str:
        return value
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    return value.item() if isinstance(value, np.generic) else value
