"""A dataset version on disk: which rows of which shards, in which split, and what became of all others."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import pyarrow.parquet as parquet

from posttrain.data.records.schema import CHANGED, FACT, RECORD, REJECTED, concat
from posttrain.data.split.split_step import Split
from posttrain.data.versions.pipeline import DROPPED, StepState, VersionBuild
from posttrain.data.versions.previous_assignment import ASSIGNMENTS, PreviousAssignment
from posttrain.data.versions.shards import CHANGES, FACTS, REJECTIONS, Shard
from posttrain.store.artifacts import ArtifactStore
from posttrain.store.files import disk_errors

EXCLUDED = 255
"""The side of a row that is not in the version."""

MANIFEST, DROPPED_FILE, FACTS_FILE = "manifest.parquet", "gone.parquet", "facts.parquet"

_UNASSIGNED_FILE = "left.parquet"

RECORDS_FILE = "records.parquet"

REJECTED_FILE = "rejected.parquet"

META_FILE = "dataset.json"


@dataclass(frozen=True)
class Version:
    """A dataset version, read piece by piece.

    Attributes:
        id: of its artifact.
        folder: of its files.
        meta: ``recipe``, ``sources``, ``phases`` (artifact ids of shards), ``splits`` (their names), ``counts``,
            ``funnel``.
        path: the folder of an artifact; shards are artifacts of their own, shared by versions.
    """

    id: str
    folder: Path
    meta: Mapping[str, Any]
    path: Callable[[str], Path] = field(repr=False)

    @staticmethod
    def open(artifacts: ArtifactStore, id: str) -> "Version":
        """The version behind an artifact of the kind ``dataset``."""
        return Version.of_folder(artifacts.path(id), id, artifacts.path)

    @staticmethod
    def of_folder(folder: Path, id: str = "", path: Callable[[str], Path] = Path) -> "Version":
        """The version in a folder; ``path`` leads to its shards."""
        return Version(id, folder, json.loads((folder / META_FILE).read_text(encoding="utf-8")), path)

    @property
    def splits(self) -> list[str]:
        """Names of the sides; the first is what models learn from."""
        return list(self.meta.get("splits", ["train"]))

    @cached_property
    def phases(self) -> list[list[Shard]]:
        """The shards of every phase of its making; the last phase holds its records."""
        return [[Shard.open(self.path(id)) for id in ids] for ids in self.meta["phases"]]

    @cached_property
    def sides(self) -> npt.NDArray[np.uint8]:
        """Uint8 [N]: the split of each row of the last phase, or `EXCLUDED`."""
        return np.asarray(parquet.read_table(self.folder / MANIFEST)["side"].to_numpy())

    def count(self, split: str) -> int:
        """How many records a split holds."""
        counts = self.meta["counts"]
        return int(counts["splits"][split] if "splits" in counts else counts["records"])

    @property
    def whole(self) -> bool:
        """Whether the records lie in the version itself, as those of the loop's small sets do."""
        return (self.folder / RECORDS_FILE).exists()

    def tables(self, split: str | None = None, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """RECORD tables (or some columns) of all records or of one split, in reading order."""
        for table, sides in self._shards(columns):
            wanted = sides != EXCLUDED if split is None else sides == self.splits.index(split)
            if wanted.any():
                yield table if wanted.all() else table.filter(pa.array(wanted))

    def sided_tables(self) -> Iterator[tuple[pa.Table, list[str]]]:
        """RECORD tables with the split of every row."""
        for table, sides in self._shards(None):
            inside = sides != EXCLUDED
            yield table.filter(pa.array(inside)), [self.splits[side] for side in sides[inside].tolist()]

    def records(self, split: str | None = None) -> pa.Table:
        """RECORD table of all records or of one split."""
        return concat(list(self.tables(split)))

    def rejected(self) -> Iterator[pa.Table]:
        """REJECTED tables of what left, in the order of the steps within a phase."""
        if self.whole:
            yield parquet.read_table(self.folder / REJECTED_FILE, schema=REJECTED)
            return
        gone = parquet.read_table(self.folder / DROPPED_FILE, schema=DROPPED)
        for number, shards in enumerate(self.phases):
            here = gone.filter(pa.compute.equal(gone["phase"], number))
            rows = np.asarray(here["row"].to_numpy())
            start = 0
            for shard in shards:
                yield parquet.read_table(shard.folder / REJECTIONS, schema=REJECTED)
                inside = (rows >= start) & (rows < start + shard.rows)
                if inside.any():
                    content = shard.records().take(pa.array(rows[inside] - start))
                    why = here.filter(pa.array(inside)).select(REJECTED.names[len(RECORD) :])
                    yield pa.table([*content.columns, *why.columns], schema=REJECTED)
                start += shard.rows

    def changed(self) -> Iterator[pa.Table]:
        """CHANGED tables, phase by phase."""
        for shards in [] if self.whole else self.phases:
            for shard in shards:
                yield parquet.read_table(shard.folder / CHANGES, schema=CHANGED)

    def facts(self) -> Iterator[pa.Table]:
        """FACT tables of what steps measured."""
        if self.whole:
            return
        for shards in self.phases:
            for shard in shards:
                yield parquet.read_table(shard.folder / FACTS, schema=FACT)
        yield parquet.read_table(self.folder / FACTS_FILE, schema=FACT)

    def states(self) -> dict[int, StepState]:
        """What global steps left for the time when the set has grown."""
        return {
            int(place): StepState(
                said["name"],
                said["step"],
                said["shards"],
                said["alive"],
                parquet.read_table(self.folder / _state_file(int(place))),
            )
            for place, said in self.meta.get("states", {}).items()
        }

    def past(self) -> PreviousAssignment:
        """What it knows of sides, for a version that grows from it."""
        if self.whole:
            return PreviousAssignment()
        left = parquet.read_table(self.folder / _UNASSIGNED_FILE, schema=ASSIGNMENTS)
        states = self.meta["states"]
        place = next((place for place, said in states.items() if said["name"] == Split.name), None)
        if place is None:
            return PreviousAssignment(gone=left)
        keys = states[place]["shards"]

        def phases() -> list[list[Shard]]:
            split = next(at for at, shards in enumerate(self.phases) if [shard.key for shard in shards] == keys)
            return self.phases[: split + 1]

        side = parquet.read_table(self.folder / _state_file(int(place)), columns=["side"])["side"].to_numpy()
        return PreviousAssignment(phases, keys, side, left)

    def _shards(self, columns: Sequence[str] | None) -> Iterator[tuple[pa.Table, npt.NDArray[np.uint8]]]:
        if self.whole:
            table = parquet.read_table(self.folder / RECORDS_FILE, columns=columns)
            yield table, np.zeros(table.num_rows, dtype=np.uint8)
            return
        start = 0
        for shard in self.phases[-1]:
            sides = self.sides[start : start + shard.rows]
            start += shard.rows
            yield shard.records(columns), sides


def write_version(folder: Path, made: VersionBuild, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Fill ``folder`` with a version; the same content always gives the same bytes.

    Args:
        meta: what `Version.meta` holds besides counts, funnel and states.

    Returns:
        The counts, for the artifact's meta.
    """
    sides = np.where(made.alive, made.sides, np.uint8(EXCLUDED)).astype(np.uint8)
    kept = {name: int((sides == side).sum()) for side, name in enumerate(meta["splits"])}
    entered = made.funnel["read", "in"]
    counts = {"records": sum(kept.values()), "read": entered, "rejected": made.rejected, "splits": kept}
    order = ["read", *(step.name for step in made.steps)]
    counted = sorted(
        made.funnel.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1] != "in", entry[0][1])
    )
    funnel = [{"step": step, "reason": reason, "count": count} for (step, reason), count in counted]
    states = {
        str(place): {"name": one.name, "step": one.step, "shards": one.shards, "alive": one.alive}
        for place, one in sorted(made.states.items())
    }
    full = {
        **meta,
        "counts": counts,
        "funnel": [*funnel, {"step": "kept", "reason": "kept", "count": counts["records"]}],
    }
    text = json.dumps({**full, "states": states}, ensure_ascii=False, indent=1, sort_keys=True)
    (folder / META_FILE).write_text(text + "\n", encoding="utf-8")
    tables = {
        MANIFEST: pa.table({"side": sides}),
        DROPPED_FILE: concat(made.gone, DROPPED),
        FACTS_FILE: concat(made.facts, FACT),
        _UNASSIGNED_FILE: concat([made.left], ASSIGNMENTS),
        **{_state_file(place): one.table for place, one in made.states.items()},
    }
    for name, table in tables.items():
        parquet.write_table(table, folder / name, compression="zstd")
    return {"counts": counts, "splits": meta["splits"]}


def _state_file(place: int) -> str:
    return f"state-{place}.parquet"


@dataclass(frozen=True)
class Dataset:
    """One version.

    Attributes:
        records: RECORD table in input order.
        rejected: REJECTED table of what this version's making took out.
        meta: ``name``, ``counts`` (records, rejected), ``funnel``, ``parent`` (artifact id or None),
            ``increment`` (record ids added, by source) and ``filters`` (what the records went through).
    """

    records: pa.Table
    rejected: pa.Table = field(default_factory=REJECTED.empty_table)
    meta: dict[str, Any] = field(default_factory=dict)


def write_dataset(
    folder: Path, records: pa.Table, rejected: pa.Table | None = None, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Fill ``folder`` with a version; the same content always gives the same bytes.

    Returns:
        ``meta`` with the ``counts`` of the tables.
    """
    rejected = REJECTED.empty_table() if rejected is None else rejected
    full = {**(meta or {}), "counts": {"records": records.num_rows, "rejected": rejected.num_rows}}
    text = json.dumps(full, ensure_ascii=False, indent=1, sort_keys=True)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(concat([records]), folder / RECORDS_FILE)
        pyarrow.parquet.write_table(concat([rejected], REJECTED), folder / REJECTED_FILE)
        (folder / META_FILE).write_text(text + "\n", encoding="utf-8")
    return full


def read_dataset(folder: Path) -> Dataset:
    """The version that :func:`write_dataset` left in ``folder``."""
    return Dataset(
        pyarrow.parquet.read_table(folder / RECORDS_FILE, schema=RECORD),
        pyarrow.parquet.read_table(folder / REJECTED_FILE, schema=REJECTED),
        json.loads((folder / META_FILE).read_text(encoding="utf-8")),
    )
