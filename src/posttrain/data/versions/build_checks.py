"""Checks while a version is built: ids, shapes, empty files and splits, and whether records are left."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as parquet

from posttrain.data.reading.rows import join_names, shorten
from posttrain.data.records.outcome import locations
from posttrain.data.records.schema import concat
from posttrain.data.split import SPLITS, SplitsConfig
from posttrain.data.split.split_step import Split
from posttrain.data.versions.pipeline import DROPPED, VersionBuild
from posttrain.data.versions.shards import USER_IDS, Shard
from posttrain.store.errors import UserError


def require_training_records(build: VersionBuild) -> None:
    """Raises a UserError if no training record is left, and names the step that rejected the most."""
    splits, rejected = build.recipe.splits, build.rejected_by_reason
    if (build.alive & (build.sides == 0)).any() or (splits is not None and not splits.shares[0]):
        return
    (step, reason), count = rejected.most_common(1)[0]
    files = ", ".join(dict.fromkeys(shard.piece["name"] for shard in build.phases[0]))
    where = {"read": files, "split": "data.splits"}.get(step, "data.steps")
    fix = f"`{step}` left out the most, {count:,}: {reason}"
    raise UserError("no record is left to learn from", where=where, fix=fix)


def require_filled_splits(build: VersionBuild, splits: SplitsConfig) -> None:
    """Raises a UserError if a split with a share is empty."""
    for side, (name, share) in enumerate(zip(SPLITS, splits.shares, strict=True)):
        if share > 0 and not (build.sides[build.alive] == side).any():
            where, message = f"data.splits.{name}", f"`{name}` is empty"
            spanning = _describe_linked(build) if splits.by == "time" else None
            if spanning is not None:
                fix = "give it more, by its share or by `data.splits.since`, or set `data.splits.group` to false"
                raise UserError(f"{message}: {spanning}", where=where, fix=fix)
            count = int(build.alive.sum())
            counted = "is 1 record" if count == 1 else f"are {count:,} records"
            raise UserError(message, where=where, fix=f"there {counted} and a share of {share:g}")


def _describe_linked(build: VersionBuild) -> str | None:
    """Describes the records that the split rejected for their links to other splits; None if there are none."""
    rejected = concat(build.rejected, DROPPED)
    rows = np.asarray(rejected.filter(pa.compute.equal(rejected["step"], Split.name))["row"])
    if not len(rows):
        return None
    table = build.corpus(0).take(rows)
    groups = table["group"].drop_null().unique().to_pylist()
    records = "1 record" if len(rows) == 1 else f"{len(rows):,} records"
    if not groups:
        return f"{records} that would be in it are linked to earlier ones, the first at {locations(table)[0]}"
    named = f"{len(groups):,} groups, {join_names(groups, 3)}" if len(groups) > 1 else f"the group {shorten(groups[0])}"
    return f"{records} were dropped because they are linked to an earlier split, of {named}"


def require_filled_files(shards: Sequence[Shard]) -> None:
    """Raises a UserError if a file holds no records."""
    counts: Counter[str] = Counter()
    for shard in shards:
        counts[shard.piece["name"]] += rows_read(shard)
    for name, count in counts.items():
        if not count:
            raise UserError("the file holds no records", where=name, fix="put records into it, or name another file")


def rows_read(shard: Shard) -> int:
    """Counts the rows of the file that the shard was read from."""
    return sum(int(count) for step, reason, count in shard.funnel if (step, reason) == ("read", "in"))


def check_shapes(shards: Sequence[Shard]) -> None:
    """Raises a UserError if the pieces of a file hold records of different shapes."""
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
    """Raises a UserError if one id stands for two contents in different files; reading a piece checks its own.

    Takes about 40 bytes of memory an id.

    About 40 bytes of memory an id.

    Raises:
        UserError: with file and line of the later record, and those of the earlier one.
    """
    files = [(shard.piece["name"], file) for shard in shards if (file := shard.folder / USER_IDS).exists()]
    # Reading has checked each piece by itself.
    if len(files) < 2:
        return
    sizes = [parquet.read_metadata(file).num_rows for _, file in files]
    starts = [0, *accumulate(sizes)]
    keys, contents = np.empty(starts[-1], "V12"), np.empty(starts[-1], "V10")
    for (_, file), start in zip(files, starts, strict=False):
        table = parquet.read_table(file, columns=["key", "content"])
        keys[start : start + table.num_rows] = _fixed_width(table["key"], 12)
        contents[start : start + table.num_rows] = _fixed_width(table["content"], 10)
    clash = _first_clash(keys, contents)
    if clash is None:
        return
    later, earlier = (_file_and_line(files, starts, row) for row in clash)
    earlier_place = f"on line {earlier[1]}" if earlier[0] == later[0] else f"at {earlier[0]}:{earlier[1]}"
    fix = "give every record an id of its own, or the column another name than `id`"
    raise UserError(f"its id stands {earlier_place} too, with other content", where=f"{later[0]}:{later[1]}", fix=fix)


def _fixed_width(column: pa.ChunkedArray, width: int) -> npt.NDArray[np.void]:
    """Views a column of ``width`` bytes a value as it lies in memory."""
    array = pa.concat_arrays(column.chunks)
    values = np.frombuffer(array.buffers()[1], dtype=f"V{width}")
    return values[array.offset : array.offset + len(array)]


def _first_clash(keys: npt.NDArray[np.void], contents: npt.NDArray[np.void]) -> tuple[int, int] | None:
    """Finds the first row whose key an earlier row has with other content, and the first row with that key.

    Args:
        keys: [N] of 12 bytes.
        contents: [N] of 10 bytes.
    """
    # Sorting 64-bit integers is many times faster than sorting 12-byte keys; all 12 bytes decide below.
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
    """Finds file and line of a row."""
    index = int(np.searchsorted(starts, row, side="right")) - 1
    name, file = files[index]
    return name, parquet.read_table(file, columns=["line"])["line"][row - starts[index]].as_py()
