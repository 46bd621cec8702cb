"""Builds a dataset version in the store from files and a recipe."""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.data.reading.data_files import DataPath, content_digest, display_path, expand_paths, to_data_path
from posttrain.data.reading.pieces import Piece, pieces
from posttrain.data.records.schema import RECORD, concat
from posttrain.data.split import SPLITS
from posttrain.data.versions.build_checks import (
    check_shapes,
    check_user_ids,
    require_filled_files,
    require_filled_splits,
    require_training_records,
    rows_read,
)
from posttrain.data.versions.named_versions import resolve_versions
from posttrain.data.versions.pipeline import VersionBuild, reading_task
from posttrain.data.versions.recipe import Recipe, Suite, row_steps
from posttrain.data.versions.shards import Shard
from posttrain.data.versions.suites import require_unseen_suites, suite_tables, wholly_shared_error
from posttrain.data.versions.version import Version, write_version
from posttrain.jobs.base import Engine
from posttrain.store.errors import DamagedArtifactError, UserError
from posttrain.store.stage_runner import PARTS, run_stage, stage_key
from posttrain.store.workspace import Workspace

VERSION = 2

STAGE = "data"

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Source:
    """Names a file that a version is built from.

    Attributes:
        name: as the user named it.
        digest: SHA-256 of its content.
        pieces: its cuts, if an earlier version has read it; the file itself may be missing then.
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
        files: named from the workspace's folder, in the order in which their records count as first.
        grown_from: a version whose files come first; its shards are reused if the recipe is the same, and the splits of
            its records always.
        suites: evaluation records that training records must not give away.
        begin: called before a build, not if the version exists; may raise to prevent it.

    Raises:
        UserError: a file is missing, a record is bad (with file and line), a step cannot run, or a suite holds training
            records and no step removes them.
    """
    root = workspace.root
    written, recipe = recipe, recipe.located(root)
    for step in recipe.steps:
        step.check()
    # Files are hashed before the build, so that a finished version is found without reading records.
    sources = _sources(files, grown_from, root)
    versions = resolve_versions([suite.file for suite in suites], root, workspace)
    digests = {
        name: versions[name].id if name in versions else content_digest(_locate(root, name), name)
        for name in (suite.file for suite in suites)
    }

    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        begin()
        evaluation = suite_tables(suites, recipe, root, versions)
        held_out = {name for name, version in versions.items() if not version.whole and len(version.splits) > 1}
        build = _run_recipe(recipe, sources, evaluation, held_out, engine, root, scratch, grown_from)
        phases = [[commit_shard(workspace, shard) for shard in shards] for shards in build.phases]
        meta = {
            "recipe": written.model_dump(mode="json"),  # its files as they were named: the same in any folder
            "keys": recipe.keys(),
            "made_of": made_of,
            "settled": build.settled,
            "sources": _source_entries(sources, build.phases[0]),
            "suites": digests,
            "splits": list(SPLITS) if recipe.splits else ["train"],
            "phases": phases,
        }
        parts = sorted({id for ids in phases for id in ids})
        return {**write_version(out, build, meta), PARTS: parts}

    inputs = {source.name: source.digest for source in sources} | {f"suite {name}": of for name, of in digests.items()}
    config = {
        **recipe.keys(),
        "files": [source.name for source in sources],
        "suites": [suite.model_dump(mode="json") for suite in suites],
    }
    made_of = stage_key(STAGE, VERSION, inputs, config, 0)
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
    """Id of the version that splits are kept from: ``grown_from``, or its parent for a rebuild from its own files."""
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
        held_out: names of suites that are the held-out side of a version.
    """
    existing = existing_shards(grown_from)
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
            _input_columns(build), suites, recipe.steps, held_out, beside=_input_columns(build, training=False)
        )
    build.run_steps(split, len(recipe.chain), concat([build.measured(), *suites.values()]))
    for name in suites:
        contaminated, count = build.contaminated.get(name, (0, 0))
        if count and contaminated == count:
            raise wholly_shared_error(name, count)
    require_training_records(build)
    return build


def _input_columns(build: VersionBuild, *, training: bool = True) -> pa.Table:
    """``input_id``, ``source`` and ``line`` of the training records, or of the held-out ones."""
    rows = np.flatnonzero(build.alive & ((build.sides == 0) == training))
    return build.corpus(0).columns(["input_id", "source", "line"]).take(pa.array(rows))


def _sources(files: Sequence[str], before: Version | None, root: Path) -> list[Source]:
    """Lists the parent's files and then the new ones; a file with new content replaces the parent's."""
    known = {
        entry["name"]: Source(
            entry["name"], entry["digest"], tuple(Piece(entry["name"], "", *piece) for piece in entry["pieces"])
        )
        for entry in (before.meta.get("sources", []) if before else [])
    }
    names = dict.fromkeys(display_path(path, root) for path in expand_paths(files, root))
    fresh = {name: Source(name, content_digest(_locate(root, name), name)) for name in names}
    for name, source in fresh.items():
        if name not in known or known[name].digest != source.digest:
            known[name] = source
    return list(known.values())


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
        path = _locate(root, source.name)
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


def _locate(root: Path, name: str) -> DataPath:
    """Resolves a name against the workspace's folder; URLs stay."""
    return to_data_path(name) if "://" in name else root / Path(name).expanduser()


def existing_shards(version: Version | None) -> dict[str, Path]:
    """Folders of a version's shards by their keys, without damaged ones, which are rebuilt."""
    if version is None or version.whole:
        return {}
    folders = {}
    for id in dict.fromkeys(id for ids in version.meta["phases"] for id in ids):
        try:
            shard = Shard.open(version.path(id))
        except DamagedArtifactError as error:
            log.warning("%s; rebuilding it", error)
            continue
        folders[shard.key] = shard.folder
    return folders


def commit_shard(workspace: Workspace, shard: Shard) -> str:
    """Commits a shard as an artifact, unless it is one already, and returns its id."""
    # Scratch folders are named by the shard's key, artifacts by their id.
    if shard.folder.name != shard.key:
        return shard.folder.name
    with workspace.artifacts.temporary_folder() as folder:
        for file in sorted(shard.folder.iterdir()):
            # Hard links spare the copy; scratch and artifact share the same bytes until scratch goes.
            os.link(file, folder / file.name)
        meta = {"rows": shard.rows, "piece": shard.piece}
        artifact = workspace.artifacts.commit(folder, "records", meta)
    workspace.metadata.add_artifact(artifact)
    return artifact.id
