"""From files and a recipe to a dataset version in the store."""

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
    """A file that a version is made of.

    Attributes:
        name: as the user named it.
        digest: of its content.
        pieces: how it was cut, where an earlier version has read it: then the file itself may be gone.
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
    """The version that the recipe makes of the files; found if it was made before, gone on with if it was begun.

    Files, recipe and the version that it grows from decide its id: neither the engine nor how often it was interrupted.
    Sides that records had before stay, so what is grown can differ from what is built at once: a record that hangs
    together with two splits leaves, where at once all three would have been on one side; and a version remembers the
    sides of records that it has lost. Where neither is so, both have one id.

    Args:
        files: named from the workspace's folder, in the order in which their records count as first.
        grown_from: a version whose files come first; its shards are taken over where the recipe is the same, and the
            sides of its records whatever the recipe.
        suites: evaluation records that training records must not give away.
        begin: called before anything is made, not where the version is found; may raise to prevent it.

    Raises:
        UserError: a file is missing, a record is bad (with file and line), a step cannot run, or training records stand
            in a suite and no step takes them out.
    """
    root = workspace.root
    written, recipe = recipe, recipe.located(root)
    for step in recipe.steps:
        step.check()
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
        made = _run_recipe(recipe, sources, evaluation, held_out, engine, root, scratch, grown_from)
        phases = [[commit_shard(workspace, shard) for shard in shards] for shards in made.phases]
        meta = {
            "recipe": written.model_dump(mode="json"),  # its files as they were named: the same in any folder
            "keys": recipe.keys(),
            "made_of": made_of,
            "settled": made.settled,
            "sources": _source_entries(sources, made.phases[0]),
            "suites": digests,
            "splits": list(SPLITS) if recipe.splits else ["train"],
            "phases": phases,
        }
        parts = sorted({id for ids in phases for id in ids})
        return {**write_version(out, made, meta), PARTS: parts}

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
    """Id of the version whose sides count: of the one grown from, or, for its own files again, of what it grew from."""
    if grown_from is None:
        return None
    made = workspace.metadata.producers(grown_from.id) if grown_from.meta.get("made_of") == made_of else []
    return made[-1].config.get("grown_from") if made else grown_from.id


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
    """Put the records through the whole chain of steps.

    Args:
        suites: RECORD table of each suite by its name.
        held_out: names of suites that are the held-out side of a version.
    """
    made_before = existing_shards(grown_from)
    made = VersionBuild(recipe, engine, scratch)
    if grown_from is not None:
        made.known, made.past = grown_from.states(), grown_from.past()
    made.read(_pieces(recipe, sources, root, scratch, made_before), made_before)
    require_filled_files(made.shards)
    check_shapes(made.shards)
    check_user_ids(made.shards)
    reading = len(row_steps(recipe.chain[: recipe.boundary], 0))
    split = recipe.boundary + (recipe.splits is not None)
    made.through(reading, split, RECORD.empty_table())
    if recipe.splits is not None:
        require_filled_splits(made, recipe.splits)
    if suites:
        require_unseen_suites(
            _input_columns(made), suites, recipe.steps, held_out, beside=_input_columns(made, training=False)
        )
    made.through(split, len(recipe.chain), concat([made.measured(), *suites.values()]))
    for name in suites:
        found, count = made.contaminated.get(name, (0, 0))
        if count and found == count:
            raise wholly_shared_error(name, count)
    require_training_records(made)
    return made


def _input_columns(made: VersionBuild, *, training: bool = True) -> pa.Table:
    """``input_id``, ``source`` and ``line`` of the records to learn from, or of those that are held out."""
    rows = np.flatnonzero(made.alive & ((made.sides == 0) == training))
    return made.corpus(0).columns(["input_id", "source", "line"]).take(pa.array(rows))


def _sources(files: Sequence[str], before: Version | None, root: Path) -> list[Source]:
    known = {
        said["name"]: Source(
            said["name"], said["digest"], tuple(Piece(said["name"], "", *piece) for piece in said["pieces"])
        )
        for said in (before.meta.get("sources", []) if before else [])
    }
    names = dict.fromkeys(display_path(found, root) for found in expand_paths(files, root))
    fresh = {name: Source(name, content_digest(_locate(root, name), name)) for name in names}
    for name, source in fresh.items():
        if name not in known or known[name].digest != source.digest:
            known[name] = source
    return list(known.values())


def _pieces(
    recipe: Recipe, sources: Sequence[Source], root: Path, scratch: Path, made_before: Mapping[str, Path]
) -> Iterator[Piece]:
    """The pieces of all sources; a file that was read before is read again only where the recipe reads otherwise.

    Raises:
        UserError: such a file is gone, or holds something else now.
    """
    for source in sources:
        if source.pieces and all(reading_task(recipe, one, scratch).key in made_before for one in source.pieces):
            yield from source.pieces
            continue
        place = _locate(root, source.name)
        if source.pieces and content_digest(place, source.name) != source.digest:
            fix = "give it back its content, or leave the steps before the first global one as they were"
            raise UserError("holds something else than when it was added", where=source.name, fix=fix)
        yield from pieces(place, source.name)


def _source_entries(sources: Sequence[Source], shards: Sequence[Shard]) -> list[dict[str, Any]]:
    cuts: dict[str, list[list[Any]]] = {source.name: [] for source in sources}
    counts = dict.fromkeys(cuts, 0)
    for shard in shards:
        name = shard.piece["name"]
        cuts[name].append([shard.piece["first_line"], shard.piece["digest"]])
        counts[name] += rows_read(shard)
    return [
        {"name": one.name, "digest": one.digest, "records": counts[one.name], "pieces": cuts[one.name]}
        for one in sources
    ]


def _locate(root: Path, name: str) -> DataPath:
    return to_data_path(name) if "://" in name else root / Path(name).expanduser()


def existing_shards(version: Version | None) -> dict[str, Path]:
    """Folders of a version's shards by their keys; without those that are damaged, which are made again."""
    if version is None or version.whole:
        return {}
    found = {}
    for id in dict.fromkeys(id for ids in version.meta["phases"] for id in ids):
        try:
            shard = Shard.open(version.path(id))
        except DamagedArtifactError as error:
            log.warning("%s; making it again", error)
            continue
        found[shard.key] = shard.folder
    return found


def commit_shard(workspace: Workspace, shard: Shard) -> str:
    """The artifact that holds a shard."""
    if shard.folder.name != shard.key:
        return shard.folder.name
    with workspace.artifacts.temporary_folder() as folder:
        for file in sorted(shard.folder.iterdir()):
            os.link(file, folder / file.name)
        meta = {"rows": shard.rows, "piece": shard.piece}
        artifact = workspace.artifacts.commit(folder, "records", meta)
    workspace.metadata.add_artifact(artifact)
    return artifact.id
