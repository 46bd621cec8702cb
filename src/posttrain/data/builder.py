"""From files and a recipe to a dataset version in the store."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.construction import Construction, reading_task
from posttrain.data.inputs import content_digest
from posttrain.data.paths import Place, expand, place, shown
from posttrain.data.pieces import Piece, pieces
from posttrain.data.reading import read
from posttrain.data.recipe import Recipe, Suite, row_steps
from posttrain.data.schema import RECORD, concat
from posttrain.data.shard import Shard
from posttrain.data.shard_ids import check_user_ids
from posttrain.data.split import SPLITS, SplitsConfig
from posttrain.data.stored_version import Version, write_version
from posttrain.jobs.engine import Engine
from posttrain.store.errors import UserError
from posttrain.store.stages import run_stage
from posttrain.store.workspace import Workspace

VERSION = 1
STAGE = "data"


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


def make_version(
    recipe: Recipe,
    files: Sequence[str],
    workspace: Workspace,
    *,
    engine: Engine,
    grown_from: Version | None = None,
    suites: Sequence[Suite] = (),
) -> Version:
    """The version that the recipe makes of the files; found if it was made before, gone on with if it was begun.

    Only the content decides the version's id: not the engine, not how often it was interrupted, and not whether it
    was made at once or grown from smaller versions.

    Args:
        files: named from the workspace's folder, in the order in which their records count as first.
        grown_from: a version whose files come first; its shards are taken over where the recipe is the same.
        suites: evaluation records that training records must not give away.

    Raises:
        UserError: a file is missing, a record is bad (with file and line), or a step cannot run.
    """
    root = workspace.root
    recipe = recipe.located(root)
    for step in recipe.steps:
        step.check()
    sources = _sources(files, grown_from, root)
    digests = {suite.file: content_digest(_place(root, suite.file), suite.file) for suite in suites}

    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        made = _construct(recipe, sources, suites, engine, root, scratch, grown_from)
        phases = [[_commit(workspace, shard) for shard in shards] for shards in made.phases]
        meta = {
            "recipe": recipe.model_dump(mode="json"),
            "settled": made.settled,
            "sources": _described(sources, made.phases[0]),
            "suites": digests,
            "splits": list(SPLITS) if recipe.splits else ["train"],
            "phases": phases,
        }
        return write_version(out, made, meta)

    artifact = run_stage(
        workspace,
        STAGE,
        VERSION,
        kind="dataset",
        inputs={source.name: source.digest for source in sources}
        | {f"suite {name}": of for name, of in digests.items()},
        config={
            **recipe.keys(),
            "files": [source.name for source in sources],
            "suites": [suite.model_dump(mode="json") for suite in suites],
        },
        seed=0,
        round=None,
        work=work,
    )
    return Version.open(workspace.artifacts, artifact.id)


def _construct(
    recipe: Recipe,
    sources: Sequence[Source],
    suites: Sequence[Suite],
    engine: Engine,
    root: Path,
    scratch: Path,
    grown_from: Version | None,
) -> Construction:
    """Put the records through the whole chain of steps."""
    made_before = _shards_of(grown_from)
    made = Construction(recipe, engine, scratch, grown_from.states() if grown_from else {})
    made.read(_pieces(recipe, sources, root, scratch, made_before), made_before)
    _refuse_empty_files(made.shards)
    _check_shapes(made.shards)
    check_user_ids(made.shards)
    reading = len(row_steps(recipe.chain[: recipe.boundary], 0))
    split = recipe.boundary + (recipe.splits is not None)
    made.through(reading, split, RECORD.empty_table())
    if recipe.splits is not None:
        _refuse_empty(made, recipe.splits)
    suite_records = {suite.file: _suite(suite, recipe, root) for suite in suites}
    made.through(split, len(recipe.chain), concat([made.measured(), *suite_records.values()]))
    for name in suite_records:
        found, count = made.given_away.get(name, (0, 0))
        if count and found == count:
            fix = "measure on records that no model has learned from, or leave those files out"
            raise UserError(f"all {count:,} records of the suite stand in the training files", where=name, fix=fix)
    return made


def _suite(suite: Suite, recipe: Recipe, root: Path) -> pa.Table:
    """RECORD table of a suite's records."""
    return concat(list(read(_place(root, suite.file), suite.columns or recipe.columns, name=suite.file)))


def _refuse_empty(made: Construction, splits: SplitsConfig) -> None:
    for side, (name, share) in enumerate(zip(SPLITS, splits.shares, strict=True)):
        if share > 0 and not (made.sides[made.alive] == side).any():
            counted = f"{int(made.alive.sum())} records and a share of {share:g}"
            raise UserError(f"`{name}` is empty", where=f"data.splits.{name}", fix=f"there are {counted}")


def _sources(files: Sequence[str], before: Version | None, root: Path) -> list[Source]:
    known = {
        said["name"]: Source(
            said["name"], said["digest"], tuple(Piece(said["name"], "", *piece) for piece in said["pieces"])
        )
        for said in (before.meta.get("sources", []) if before else [])
    }
    names = dict.fromkeys(shown(found, root) for found in expand(files, root))
    fresh = {name: Source(name, content_digest(_place(root, name), name)) for name in names}
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
        place = _place(root, source.name)
        if source.pieces and content_digest(place, source.name) != source.digest:
            fix = "give it back its content, or leave the steps before the first global one as they were"
            raise UserError("holds something else than when it was added", where=source.name, fix=fix)
        yield from pieces(place, source.name)


def _described(sources: Sequence[Source], shards: Sequence[Shard]) -> list[dict[str, Any]]:
    cuts: dict[str, list[list[Any]]] = {source.name: [] for source in sources}
    counts = dict.fromkeys(cuts, 0)
    for shard in shards:
        name = shard.piece["name"]
        cuts[name].append([shard.piece["first_line"], shard.piece["digest"]])
        counts[name] += _read(shard)
    return [
        {"name": one.name, "digest": one.digest, "records": counts[one.name], "pieces": cuts[one.name]}
        for one in sources
    ]


def _shards_of(version: Version | None) -> dict[str, Path]:
    """Folders of a version's shards by their keys."""
    if version is None or version.whole:
        return {}
    return {shard.key: shard.folder for shards in version.phases for shard in shards}


def _refuse_empty_files(shards: Sequence[Shard]) -> None:
    counts: Counter[str] = Counter()
    for shard in shards:
        counts[shard.piece["name"]] += _read(shard)
    for name, count in counts.items():
        if not count:
            raise UserError("the file holds no records", where=name, fix="put records into it, or name another file")


def _read(shard: Shard) -> int:
    """How many rows of the file the shard was made of."""
    return sum(int(count) for step, reason, count in shard.funnel if (step, reason) == ("read", "in"))


def _check_shapes(shards: Sequence[Shard]) -> None:
    """Refuse a file whose pieces hold records of different shapes."""
    first: dict[str, Shard] = {}
    for shard in shards:
        other = first.setdefault(shard.piece["name"], shard)
        if shard.shape != other.shape:
            message = (
                f"has the shape `{shard.shape}`, but line {other.piece['first_line']} has the shape `{other.shape}`"
            )
            where = f"{shard.piece['name']}:{shard.piece['first_line']}"
            raise UserError(message, where=where, fix="keep one shape in one file")


def _commit(workspace: Workspace, shard: Shard) -> str:
    """The artifact that holds a shard."""
    if shard.folder.name != shard.key:
        return shard.folder.name
    with workspace.artifacts.stage() as folder:
        for file in sorted(shard.folder.iterdir()):
            os.link(file, folder / file.name)
        meta = {"rows": shard.rows, "piece": shard.piece}
        artifact = workspace.artifacts.commit(folder, "records", meta)
    workspace.metadata.add_artifact(artifact)
    return artifact.id


def _place(root: Path, name: str) -> Place:
    return place(name) if "://" in name else root / Path(name).expanduser()
