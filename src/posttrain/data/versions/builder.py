"""From files and a recipe to a dataset version in the store."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from posttrain.data.contamination.suite_check import refuse_equal_inputs, wholly_shared
from posttrain.data.reading.inputs import content_digest
from posttrain.data.reading.paths import Place, expand, place, shown
from posttrain.data.reading.pieces import Piece, pieces
from posttrain.data.reading.problem import listed, shortened
from posttrain.data.records.schema import RECORD, concat
from posttrain.data.split import SPLITS, SplitsConfig
from posttrain.data.split.step import Split
from posttrain.data.steps.step import places
from posttrain.data.versions.construction import GONE, Construction, reading_task
from posttrain.data.versions.named_versions import versions_named
from posttrain.data.versions.recipe import Recipe, Suite, row_steps
from posttrain.data.versions.shard import Shard
from posttrain.data.versions.shard_ids import check_user_ids
from posttrain.data.versions.stored_shards import commit_shard, shards_of
from posttrain.data.versions.stored_version import Version, write_version
from posttrain.data.versions.suite_records import suite_tables
from posttrain.jobs.engine import Engine
from posttrain.store.errors import UserError
from posttrain.store.stages import PARTS, run_stage, stage_key
from posttrain.store.workspace import Workspace

VERSION = 2
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
    versions = versions_named([suite.file for suite in suites], root, workspace)
    digests = {
        name: versions[name].id if name in versions else content_digest(_place(root, name), name)
        for name in (suite.file for suite in suites)
    }

    def work(out: Path, scratch: Path) -> Mapping[str, Any]:
        begin()
        evaluation = suite_tables(suites, recipe, root, versions)
        held_out = {name for name, version in versions.items() if not version.whole and len(version.splits) > 1}
        made = _construct(recipe, sources, evaluation, held_out, engine, root, scratch, grown_from)
        phases = [[commit_shard(workspace, shard) for shard in shards] for shards in made.phases]
        meta = {
            "recipe": written.model_dump(mode="json"),  # its files as they were named: the same in any folder
            "keys": recipe.keys(),
            "made_of": made_of,
            "settled": made.settled,
            "sources": _described(sources, made.phases[0]),
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
        config={**config, "grown_from": _past_of(grown_from, made_of, workspace)},
        seed=0,
        round=None,
        work=work,
    )
    return Version.open(workspace.artifacts, artifact.id)


def _past_of(grown_from: Version | None, made_of: str, workspace: Workspace) -> str | None:
    """Id of the version whose sides count: of the one grown from, or, for its own files again, of what it grew from."""
    if grown_from is None:
        return None
    made = workspace.metadata.producers(grown_from.id) if grown_from.meta.get("made_of") == made_of else []
    return made[-1].config.get("grown_from") if made else grown_from.id


def _construct(
    recipe: Recipe,
    sources: Sequence[Source],
    suites: Mapping[str, pa.Table],
    held_out: Collection[str],
    engine: Engine,
    root: Path,
    scratch: Path,
    grown_from: Version | None,
) -> Construction:
    """Put the records through the whole chain of steps.

    Args:
        suites: RECORD table of each suite by its name.
        held_out: names of suites that are the held-out side of a version.
    """
    made_before = shards_of(grown_from)
    made = Construction(recipe, engine, scratch)
    if grown_from is not None:
        made.known, made.past = grown_from.states(), grown_from.past()
    made.read(_pieces(recipe, sources, root, scratch, made_before), made_before)
    _refuse_empty_files(made.shards)
    _check_shapes(made.shards)
    check_user_ids(made.shards)
    reading = len(row_steps(recipe.chain[: recipe.boundary], 0))
    split = recipe.boundary + (recipe.splits is not None)
    made.through(reading, split, RECORD.empty_table())
    if recipe.splits is not None:
        _refuse_empty(made, recipe.splits)
    if suites:
        refuse_equal_inputs(_inputs(made), suites, recipe.steps, held_out, beside=_inputs(made, training=False))
    made.through(split, len(recipe.chain), concat([made.measured(), *suites.values()]))
    for name in suites:
        found, count = made.given_away.get(name, (0, 0))
        if count and found == count:
            raise wholly_shared(name, count)
    _refuse_nothing_left(made)
    return made


def _refuse_nothing_left(made: Construction) -> None:
    splits, gone = made.recipe.splits, made.gone_by_reason
    if (made.alive & (made.sides == 0)).any() or (splits is not None and not splits.shares[0]):
        return
    (step, reason), count = gone.most_common(1)[0]
    files = ", ".join(dict.fromkeys(shard.piece["name"] for shard in made.phases[0]))
    where = {"read": files, "split": "data.splits"}.get(step, "data.steps")
    said = f"`{step}` left out the most, {count:,}: {reason}"
    raise UserError("no record is left to learn from", where=where, fix=said)


def _inputs(made: Construction, *, training: bool = True) -> pa.Table:
    """``input_id``, ``source`` and ``line`` of the records to learn from, or of those that are held out."""
    rows = np.flatnonzero(made.alive & ((made.sides == 0) == training))
    return made.corpus(0).columns(["input_id", "source", "line"]).take(pa.array(rows))


def _refuse_empty(made: Construction, splits: SplitsConfig) -> None:
    for side, (name, share) in enumerate(zip(SPLITS, splits.shares, strict=True)):
        if share > 0 and not (made.sides[made.alive] == side).any():
            where, message = f"data.splits.{name}", f"`{name}` is empty"
            spanning = _spanning(made) if splits.by == "time" else None
            if spanning is not None:
                fix = "give it more, by its share or by `data.splits.since`, or set `data.splits.group` to false"
                raise UserError(f"{message}: {spanning}", where=where, fix=fix)
            count = int(made.alive.sum())
            counted = "is 1 record" if count == 1 else f"are {count:,} records"
            raise UserError(message, where=where, fix=f"there {counted} and a share of {share:g}")


def _spanning(made: Construction) -> str | None:
    """Which records the split took out because they hang together with others, in words; None where there are none."""
    gone = concat(made.gone, GONE)
    rows = np.asarray(gone.filter(pa.compute.equal(gone["step"], Split.name))["row"])
    if not len(rows):
        return None
    table = made.corpus(0).take(rows)
    groups = table["group"].drop_null().unique().to_pylist()
    records = "1 record" if len(rows) == 1 else f"{len(rows):,} records"
    if not groups:
        return f"{records} that would be in it hang together with earlier ones, the first at {places(table)[0]}"
    named = f"{len(groups):,} groups, {listed(groups, 3)}" if len(groups) > 1 else f"the group {shortened(groups[0])}"
    return f"{records} left that reach over its border from an earlier split, of {named}"


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
        if shard.shape is None:  # blank lines
            continue
        other = first.setdefault(shard.piece["name"], shard)
        if shard.shape != other.shape:
            message = (
                f"has the shape `{shard.shape}`, but line {other.piece['first_line']} has the shape `{other.shape}`"
            )
            where = f"{shard.piece['name']}:{shard.piece['first_line']}"
            raise UserError(message, where=where, fix="keep one shape in one file")


def _place(root: Path, name: str) -> Place:
    return place(name) if "://" in name else root / Path(name).expanduser()
