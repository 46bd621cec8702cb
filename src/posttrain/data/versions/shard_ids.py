"""One id of the user's is one content, over all files of a version."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.data.versions.shard import USER_IDS, Shard
from posttrain.store.errors import UserError


def check_user_ids(shards: Sequence[Shard]) -> None:
    """Refuse files in which one id stands for two contents; of one piece its reading has done so already.

    About 40 bytes of memory an id.

    Raises:
        UserError: with file and line of the later record, and those of the earlier one.
    """
    files = [(shard.piece["name"], file) for shard in shards if (file := shard.folder / USER_IDS).exists()]
    if len(files) < 2:
        return
    sizes = [parquet.read_metadata(file).num_rows for _, file in files]
    starts = [0, *accumulate(sizes)]
    keys, contents = np.empty(starts[-1], "V12"), np.empty(starts[-1], "V10")
    for (_, file), start in zip(files, starts, strict=False):
        table = parquet.read_table(file, columns=["key", "content"])
        keys[start : start + table.num_rows] = _fixed(table["key"], 12)
        contents[start : start + table.num_rows] = _fixed(table["content"], 10)
    found = _first_clash(keys, contents)
    if found is None:
        return
    later, earlier = (_place(files, starts, row) for row in found)
    stands = f"on line {earlier[1]}" if earlier[0] == later[0] else f"at {earlier[0]}:{earlier[1]}"
    fix = "give every record an id of its own, or the column another name than `id`"
    raise UserError(f"its id stands {stands} too, with other content", where=f"{later[0]}:{later[1]}", fix=fix)


def _fixed(column: pa.ChunkedArray, width: int) -> npt.NDArray[np.void]:
    """The values of a column of ``width`` bytes each, as they lie in memory."""
    array = pa.concat_arrays(column.chunks)
    values = np.frombuffer(array.buffers()[1], dtype=f"V{width}")
    return values[array.offset : array.offset + len(array)]


def _first_clash(keys: npt.NDArray[np.void], contents: npt.NDArray[np.void]) -> tuple[int, int] | None:
    """The first row whose key an earlier row has with other content, and the first row with that key.

    Args:
        keys: [N] of 12 bytes, told apart by 8 of them until there is something to look at.
        contents: [N] of 10 bytes.
    """
    short = np.ascontiguousarray(keys.view(np.uint8).reshape(-1, 12)[:, :8]).view(np.uint64).ravel()
    order = np.argsort(short, kind="stable")
    before, after = order[:-1], order[1:]
    clashing = (short[before] == short[after]) & (contents[before] != contents[after])
    suspects = np.flatnonzero(np.isin(short, short[before[clashing]]))
    firsts: dict[bytes, int] = {}
    for row in suspects.tolist():
        first = firsts.setdefault(keys[row].tobytes(), row)
        if contents[row] != contents[first]:
            return row, first
    return None


def _place(files: Sequence[tuple[str, Path]], starts: Sequence[int], row: int) -> tuple[str, int]:
    """File and line of a row."""
    at = int(np.searchsorted(starts, row, side="right")) - 1
    name, file = files[at]
    return name, parquet.read_table(file, columns=["line"])["line"][row - starts[at]].as_py()
