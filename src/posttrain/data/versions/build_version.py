"""Builds a dataset version in the store from files and a recipe."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as parquet

from posttrain.data.reading.data_files import content_digest, display_path, expand_paths, locate_file
from posttrain.data.reading.pieces import Piece, pieces
from posttrain.data.reading.rows import join_names
from posttrain.data.records.record import RECORD, concat, locations
from posttrain.data.split import SPLITS, SplitsConfig
from posttrain.data.split.split_step import Split
from posttrain.data.versions.named_versions import resolve_versions
from posttrain.data.versions.pipeline import DROPPED, VersionBuild, reading_task
from posttrain.data.versions.recipe import Recipe, Suite, row_steps
from posttrain.data.versions.shards import USER_IDS, Shard, commit_shard
from posttrain.data.versions.suites import require_unseen_suites, suite_tables, wholly_shared_error
from posttrain.data.versions.version import Version, write_version
from posttrain.jobs.map import Engine
from posttrain.store.errors import UserError, shorten
from posttrain.store.stage_runner import PARTS, run_stage, stage_key
from posttrain.store.workspace import Workspace

VERSION = 2

STAGE = "data"


@dataclass(frozen=True)
class Source:
    """Names a file that a version is built from.

    Attributes:
        name: As the user named it.
        digest: SHA-256 of its content.
        pieces: Its cuts, if an earlier version has read it; the file itself may be missing then.
    """

    name: str
    digest: str
    pieces: tuple[Piece, ...] | None = None


def build_version(
    recipe: Recipe,
    files: Sequence[str],
    workspace: Workspace,
    *,
    engine: Engine,
    grown_from: Version | None = None,
    suites: Sequence[Suite] = (),
    begin: Callable[[], None] = lambda: None,
) -> Version:
    """Builds the version that the recipe makes of the files, resumes an interrupted build, or returns a finished one.

    Files, recipe and the version that it grows from decide its id: neither the engine nor how often it was interrupted.
    Records keep their splits, so a grown version can differ from one built at once: a new record linked to records of
    two splits is dropped, where at once all three would be in one split; and a version remembers the splits of records
    that it has lost. Otherwise both have the same id.

    Args:
        files: Named from the workspace's folder, in the order in which their records count as first.
        grown_from: A version whose files come first; its shards are reused if the recipe is the same, and the splits of
            its records always.
        suites: Evaluation records that training records must not overlap with.
        begin: Called before a build, not if the version exists; may raise to prevent it.

    Raises:
        UserError: a file is missing, a record is bad (with file and line), a step cannot run, or a suite holds training
            records and no step removes them.
    """
    root = workspace.root
    original, recipe = recipe, recipe.located(root)
    for step in recipe.steps:
        step.check()
    # Files are hashed before the build, so that a finished version is found without reading records.
    sources = _sources(files, grown_from, root)
    versions = resolve_versions([suite.file for suite in suites], root, workspace) if suites else {}
    digests = {
        name: versions[name].id if name in versions else content_digest(locate_file(root, name), name)
        for name in (suite.file for suite in suites)
    }
    inputs = {source.name: source.digest for source in sources} | {f"suite {name}": of for name, of in digests.items()}
    config = {
        **recipe.keys(),
        "files": [source.name for source in sources],
        "suites": [suite.model_dump(mode="json") for suite in suites],
    }
    # Identifies files and recipe, whatever the version grew from: see `_history_id`.
    made_of = stage_key(STAGE, VERSION, inputs, config, 0)

    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        begin()
        evaluation = suite_tables(suites, recipe, root, versions) if suites else {}
        held_out = {name for name, version in versions.items() if not version.whole and len(version.splits) > 1}
        build = _run_recipe(recipe, sources, evaluation, held_out, engine, root, scratch, grown_from)
        phases = [[commit_shard(workspace, shard) for shard in shards] for shards in build.phases]
        meta = {
            # Its files as they were named: the same in any folder.
            "recipe": original.model_dump(mode="json"),
            "keys": recipe.keys(),
            "made_of": made_of,
            "settled": build.frozen_settings,
            "sources": _source_entries(sources, build.phases[0]),
            "suites": digests,
            "splits": list(SPLITS) if recipe.splits else ["train"],
            "phases": phases,
        }
        # Listed as parts, so that shards that several versions share are stored once and kept while one of them lives.
        parts = sorted({id for ids in phases for id in ids})
        return {**write_version(out, build, meta), PARTS: parts}

    artifact = run_stage(
        workspace,
        STAGE,
        VERSION,
        kind="dataset",
        inputs=inputs,
        # Not among the inputs: a version that others grew from may go.
        config={**config, "grown_from": _history_id(grown_from, made_of, workspace)},
        seed=0,
        round=None,
        work=work,
    )
    return Version.open(workspace.artifacts, artifact.id)


def _history_id(grown_from: Version | None, made_of: str, workspace: Workspace) -> str | None:
    """Returns the id of the version that splits come from: ``grown_from``, or its parent for its own files."""
    if grown_from is None:
        return None
    # Building a version's own files again must find that version, not one that grew from it.
    runs = workspace.metadata.producers(grown_from.id) if grown_from.meta.get("made_of") == made_of else []
    return runs[-1].config.get("grown_from") if runs else grown_from.id


def _run_recipe(
    recipe: Recipe,
    sources: Sequence[Source],
    suites: Mapping[str, pa.Table],
    held_out: Collection[str],
    engine: Engine,
    root: Path,
    scratch: Path,
    grown_from: Version | None,
) -> VersionBuild:
    """Runs all records through the chain of steps.

    Args:
        suites: RECORD table of each suite by its name.
        held_out: Names of suites that are the held-out side of a version.
    """
    existing = {} if grown_from is None else grown_from.intact_shards()
    build = VersionBuild(recipe, engine, scratch)
    if grown_from is not None:
        build.previous_states, build.previous_assignment = grown_from.states(), grown_from.previous_assignment()
    build.read(_pieces(recipe, sources, root, scratch, existing), existing)
    require_filled_files(build.shards)
    check_shapes(build.shards)
    check_user_ids(build.shards)
    reading = len(row_steps(recipe.chain[: recipe.boundary], 0))
    split = recipe.boundary + (recipe.splits is not None)
    build.run_steps(reading, split, RECORD.empty_table())
    if recipe.splits is not None:
        require_filled_splits(build, recipe.splits)
    if suites:
        require_unseen_suites(
            _input_columns(build), suites, recipe.steps, held_out, others=_input_columns(build, training=False)
        )
    # After the split, as only now it is known what is measured on.
    build.run_steps(split, len(recipe.chain), concat([build.held_out_records(), *suites.values()]))
    for name in suites:
        contaminated, count = build.contaminated.get(name, (0, 0))
        if count and contaminated == count:
            raise wholly_shared_error(name, count)
    require_training_records(build)
    return build


def _input_columns(build: VersionBuild, *, training: bool = True) -> pa.Table:
    """Reads ``input_id``, ``source`` and ``line`` of the training records, or of the held-out ones."""
    rows = np.flatnonzero(build.alive & ((build.splits == 0) == training))
    return build.corpus(0).columns(["input_id", "source", "line"]).take(pa.array(rows))


def _sources(files: Sequence[str], before: Version | None, root: Path) -> list[Source]:
    """Lists the parent's files and then the new ones; a file with new content replaces the parent's."""
    by_name = {
        entry["name"]: Source(
            entry["name"], entry["digest"], tuple(Piece(entry["name"], "", *piece) for piece in entry["pieces"])
        )
        for entry in (before.meta.get("sources", []) if before else [])
    }
    names = dict.fromkeys(display_path(path, root) for path in expand_paths(files, root))
    new = {name: Source(name, content_digest(locate_file(root, name), name)) for name in names}
    for name, source in new.items():
        if name not in by_name or by_name[name].digest != source.digest:
            # A file with new content keeps its place: records count as first in the order of the files.
            by_name[name] = source
    return list(by_name.values())


def _pieces(
    recipe: Recipe, sources: Sequence[Source], root: Path, scratch: Path, existing: Mapping[str, Path]
) -> Iterator[Piece]:
    """Yields the pieces of all sources, and cuts a file again only if the recipe reads it in another way.

    Raises:
        UserError: a file that has to be read again is missing or changed.
    """
    for source in sources:
        if source.pieces and all(reading_task(recipe, piece, scratch).key in existing for piece in source.pieces):
            yield from source.pieces
            continue
        path = locate_file(root, source.name)
        if source.pieces and content_digest(path, source.name) != source.digest:
            fix = "restore its content, or keep the steps before the first global one unchanged"
            raise UserError("has changed since it was added", where=source.name, fix=fix)
        yield from pieces(path, source.name)


def _source_entries(sources: Sequence[Source], shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """Describes the sources for the version's meta: digest, records read, and pieces."""
    cuts: dict[str, list[list[Any]]] = {source.name: [] for source in sources}
    counts = dict.fromkeys(cuts, 0)
    for shard in shards:
        name = shard.piece["name"]
        cuts[name].append([shard.piece["first_line"], shard.piece["digest"]])
        counts[name] += rows_read(shard)
    return [
        {"name": source.name, "digest": source.digest, "records": counts[source.name], "pieces": cuts[source.name]}
        for source in sources
    ]


def require_training_records(build: VersionBuild) -> None:
    """Raises a UserError if no training record is left, and names the step that rejected the most."""
    splits, rejected = build.recipe.splits, build.rejected_by_reason
    if (build.alive & (build.splits == 0)).any() or (splits is not None and not splits.shares[0]):
        return
    (step, reason), count = rejected.most_common(1)[0]
    files = ", ".join(dict.fromkeys(shard.piece["name"] for shard in build.phases[0]))
    where = {"read": files, "split": "data.splits"}.get(step, "data.steps")
    fix = f"`{step}` rejected the most, {count:,}: {reason}"
    raise UserError("no record is left to learn from", where=where, fix=fix)


def require_filled_splits(build: VersionBuild, splits: SplitsConfig) -> None:
    """Raises a UserError if a split with a share is empty."""
    for index, (name, share) in enumerate(zip(SPLITS, splits.shares, strict=True)):
        if share > 0 and not (build.splits[build.alive] == index).any():
            where, message = f"data.splits.{name}", f"`{name}` is empty"
            spanning = _describe_linked(build) if splits.by == "time" else None
            if spanning is not None:
                fix = "give it more, by its share or by `data.splits.since`, or set `data.splits.group` to false"
                raise UserError(f"{message}: {spanning}", where=where, fix=fix)
            count = int(build.alive.sum())
            records_text = "is 1 record" if count == 1 else f"are {count:,} records"
            raise UserError(message, where=where, fix=f"there {records_text} and a share of {share:g}")


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
    group_text = (
        f"{len(groups):,} groups, {join_names(groups, 3)}" if len(groups) > 1 else f"the group {shorten(groups[0])}"
    )
    return f"{records} were dropped because they are linked to an earlier split, of {group_text}"


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
    earlier_line = f"on line {earlier[1]}" if earlier[0] == later[0] else f"at {earlier[0]}:{earlier[1]}"
    fix = "give every record an id of its own, or the column another name than `id`"
    raise UserError(f"its id also occurs {earlier_line}, with other content", where=f"{later[0]}:{later[1]}", fix=fix)


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
