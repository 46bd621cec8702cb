"""Checks while a version is built: ids, shapes, empty files and splits, and whether records are left."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.data.reading.rows import join_names, shorten
from posttrain.data.records.outcome import locations
from posttrain.data.records.schema import concat
from posttrain.data.split import SPLITS, SplitsConfig
from posttrain.data.split.split_step import Split
from posttrain.data.versions.pipeline import DROPPED, VersionBuild
from posttrain.data.versions.shards import USER_IDS, Shard
from posttrain.store.errors import UserError


def require_training_records(made: VersionBuild) -> None:
    splits, gone = made.recipe.splits, made.gone_by_reason
    if (made.alive & (made.sides == 0)).any() or (splits is not None and not splits.shares[0]):
        return
    (step, reason), count = gone.most_common(1)[0]
    files = ", ".join(dict.fromkeys(shard.piece["name"] for shard in made.phases[0]))
    where = {"read": files, "split": "data.splits"}.get(step, "data.steps")
    said = f"`{step}` left out the most, {count:,}: {reason}"
    raise UserError("no record is left to learn from", where=where, fix=said)


def require_filled_splits(made: VersionBuild, splits: SplitsConfig) -> None:
    for side, (name, share) in enumerate(zip(SPLITS, splits.shares, strict=True)):
        if share > 0 and not (made.sides[made.alive] == side).any():
            where, message = f"data.splits.{name}", f"`{name}` is empty"
            spanning = _describe_linked(made) if splits.by == "time" else None
            if spanning is not None:
                fix = "give it more, by its share or by `data.splits.since`, or set `data.splits.group` to false"
                raise UserError(f"{message}: {spanning}", where=where, fix=fix)
            count = int(made.alive.sum())
            counted = "is 1 record" if count == 1 else f"are {count:,} records"
            raise UserError(message, where=where, fix=f"there {counted} and a share of {share:g}")


def _describe_linked(made: VersionBuild) -> str | None:
    """Which records the split took out because they hang together with others, in words; None where there are none."""
    gone = concat(made.gone, DROPPED)
    rows = np.asarray(gone.filter(pa.compute.equal(gone["step"], Split.name))["row"])
    if not len(rows):
        return None
    table = made.corpus(0).take(rows)
    groups = table["group"].drop_null().unique().to_pylist()
    records = "1 record" if len(rows) == 1 else f"{len(rows):,} records"
    if not groups:
        return f"{records} that would be in it hang together with earlier ones, the first at {locations(table)[0]}"
    named = f"{len(groups):,} groups, {join_names(groups, 3)}" if len(groups) > 1 else f"the group {shorten(groups[0])}"
    return f"{records} left that reach over its border from an earlier split, of {named}"


def require_filled_files(shards: Sequence[Shard]) -> None:
    counts: Counter[str] = Counter()
    for shard in shards:
        counts[shard.piece["name"]] += rows_read(shard)
    for name, count in counts.items():
        if not count:
            raise UserError("the file holds no records", where=name, fix="put records into it, or name another file")


def rows_read(shard: Shard) -> int:
    """How many rows of the file the shard was made of."""
    return sum(int(count) for step, reason, count in shard.funnel if (step, reason) == ("read", "in"))


def check_shapes(shards: Sequence[Shard]) -> None:
    """Refuse a file whose pieces hold records of different shapes."""
    first: dict[str, Shard] = {}
    for shard in shards:
        if shard.shape is None:  # blank lines
            continue
        other = first.setdefault(shard.piece["name"], shard)
        if shard.shape != other.shape:
            message = (
                f"has the shape `{shard.shape}`, but line {other.piece['first_line']} has the shape `{other.shape}`"
            )
            where = f"{shard.piece['name']}:{shard.piece['first_line']}"
            raise UserError(message, where=where, fix="keep one shape in one file")


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
        keys[start : start + table.num_rows] = _fixed_width(table["key"], 12)
        contents[start : start + table.num_rows] = _fixed_width(table["content"], 10)
    found = _first_clash(keys, contents)
    if found is None:
        return
    later, earlier = (_file_and_line(files, starts, row) for row in found)
    stands = f"on line {earlier[1]}" if earlier[0] == later[0] else f"at {earlier[0]}:{earlier[1]}"
    fix = "give every record an id of its own, or the column another name than `id`"
    raise UserError(f"its id stands {stands} too, with other content", where=f"{later[0]}:{later[1]}", fix=fix)


def _fixed_width(column: pa.ChunkedArray, width: int) -> npt.NDArray[np.void]:
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


def _file_and_line(files: Sequence[tuple[str, Path]], starts: Sequence[int], row: int) -> tuple[str, int]:
    """File and line of a row."""
    at = int(np.searchsorted(starts, row, side="right")) - 1
    name, file = files[at]
    return name, parquet.read_table(file, columns=["line"])["line"][row - starts[at]].as_py()
