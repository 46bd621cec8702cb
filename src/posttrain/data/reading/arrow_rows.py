"""Rows of Parquet files and of folders that Hugging Face `datasets` has saved."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from posttrain.data.reading.opening import opened
from posttrain.data.reading.paths import Place, compression
from posttrain.data.reading.problem import Problem, listed
from posttrain.data.reading.row import Rows, checked

BATCH_ROWS = 1024


def parquet_rows(path: Place, name: str) -> Rows:
    """The rows of a .parquet file; an empty file has none."""
    if compression(path):
        fix = "decompress it; Parquet compresses by itself"
        yield Problem(name, None, "unknown format", "a compressed Parquet file cannot be read in pieces", fix)
        return
    with opened(path, name) as source:
        if not source.read(1):
            return
        source.seek(0)
        with pyarrow.parquet.ParquetFile(source) as file:
            yield from _batches(file.iter_batches(BATCH_ROWS), name)


def folder_rows(path: Path, name: str) -> Rows:
    """The rows of the .arrow files in a folder."""
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


def _batches(batches: Iterator[pa.RecordBatch], name: str) -> Rows:
    line = 0
    for batch in batches:
        names = batch.schema.names
        if len(set(names)) < len(names):
            message = f"a column stands there twice; the columns are {listed(names)}"
            yield Problem(name, 1, "repeated column", message)
            return
        try:
            batch.validate(full=True)
            values = batch.to_pylist()
        except (ValueError, OverflowError, pa.ArrowException) as error:
            message = f"a value of rows {line + 1:,} to {line + batch.num_rows:,} cannot be read: {error}"
            yield Problem(name, line + 1, "damaged file", message)
            return
        for row in values:
            line += 1
            yield checked(row, name, line)
