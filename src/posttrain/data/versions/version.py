"""Reads and writes dataset versions: which rows of which shards, in which split, and why others were rejected."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as parquet

from posttrain.data.records.record import CHANGED, FACT, RECORD, REJECTED, concat
from posttrain.data.split.split_step import Split
from posttrain.data.versions.pipeline import DROPPED, StepState, VersionBuild
from posttrain.data.versions.previous_assignment import ASSIGNMENTS, PreviousAssignment
from posttrain.data.versions.shards import CHANGES, FACTS, REJECTIONS, Shard
from posttrain.store.artifacts import ArtifactStore
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.files import disk_errors, make_folder

EXCLUDED = 255
"""Split index of a row that is not in the version."""

MANIFEST, DROPPED_FILE, FACTS_FILE = "manifest.parquet", "gone.parquet", "facts.parquet"

_UNASSIGNED_FILE = "left.parquet"

RECORDS_FILE = "records.parquet"

REJECTED_FILE = "rejected.parquet"

META_FILE = "dataset.json"

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Version:
    """Reads a dataset version piece by piece.

    Attributes:
        id: Id of its artifact.
        folder: Folder of its files.
        meta: ``recipe``, ``sources``, ``phases`` (artifact ids of shards), ``splits`` (their names), ``counts``,
            ``funnel``.
        path: The folder of an artifact; shards are artifacts of their own, shared by versions.
    """

    id: str
    folder: Path
    meta: Mapping[str, Any]
    path: Callable[[str], Path] = field(repr=False)

    @staticmethod
    def open(artifacts: ArtifactStore, id: str) -> "Version":
        """Opens the version behind an artifact of the kind ``dataset``."""
        return Version.open_folder(artifacts.path(id), id, artifacts.path)

    @staticmethod
    def open_folder(folder: Path, id: str = "", path: Callable[[str], Path] = Path) -> "Version":
        """Opens the version in a folder; ``path`` leads to its shards."""
        return Version(id, folder, json.loads((folder / META_FILE).read_text(encoding="utf-8")), path)

    @property
    def splits(self) -> list[str]:
        """Names of the splits; the first is the training split."""
        return list(self.meta.get("splits", ["train"]))

    @cached_property
    def phases(self) -> list[list[Shard]]:
        """Shards of every phase of the build; the last phase holds the records."""
        return [[Shard.open(self.path(id)) for id in ids] for ids in self.meta["phases"]]

    @cached_property
    def row_splits(self) -> npt.NDArray[np.uint8]:
        """The split of each row of the last phase, or `EXCLUDED`: uint8 [N]."""
        return np.asarray(parquet.read_table(self.folder / MANIFEST)["side"].to_numpy())

    def intact_shards(self) -> dict[str, Path]:
        """Returns the folders of the version's shards by their keys, without damaged ones, which are rebuilt."""
        folders = {}
        for id in dict.fromkeys(id for ids in self.meta.get("phases", []) for id in ids):
            try:
                shard = Shard.open(self.path(id))
            except DamagedArtifactError as error:
                log.warning("%s; rebuilding it", error)
                continue
            folders[shard.key] = shard.folder
        return folders

    def count(self, split: str) -> int:
        """Counts the records in a split."""
        counts = self.meta["counts"]
        return int(counts["splits"][split] if "splits" in counts else counts["records"])

    @property
    def whole(self) -> bool:
        """True if the records lie in the version's own folder, as those of the loop's small sets do."""
        return (self.folder / RECORDS_FILE).exists()

    def tables(self, split: str | None = None, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yields RECORD tables (or some columns) of all records or of one split, in reading order."""
        for table, row_splits in self._shards(columns):
            selected = row_splits != EXCLUDED if split is None else row_splits == self.splits.index(split)
            if selected.any():
                yield table if selected.all() else table.filter(pa.array(selected))

    def tables_with_splits(self) -> Iterator[tuple[pa.Table, list[str]]]:
        """Yields RECORD tables with the split of every row."""
        for table, row_splits in self._shards(None):
            inside = row_splits != EXCLUDED
            yield table.filter(pa.array(inside)), [self.splits[index] for index in row_splits[inside].tolist()]

    def records(self, split: str | None = None) -> pa.Table:
        """Reads all records, or those of one split, into one RECORD table."""
        return concat(list(self.tables(split)))

    def rejected(self) -> Iterator[pa.Table]:
        """Yields REJECTED tables, in the order of the steps within a phase."""
        if self.whole:
            yield parquet.read_table(self.folder / REJECTED_FILE, schema=REJECTED)
            return
        dropped = parquet.read_table(self.folder / DROPPED_FILE, schema=DROPPED)
        for number, shards in enumerate(self.phases):
            # Global steps keep only row numbers; the shards of the phase hold the records' content.
            dropped_rows = dropped.filter(pa.compute.equal(dropped["phase"], number))
            rows = np.asarray(dropped_rows["row"].to_numpy())
            start = 0
            for shard in shards:
                yield parquet.read_table(shard.folder / REJECTIONS, schema=REJECTED)
                inside = (rows >= start) & (rows < start + shard.rows)
                if inside.any():
                    content = shard.records().take(pa.array(rows[inside] - start))
                    reasons = dropped_rows.filter(pa.array(inside)).select(REJECTED.names[len(RECORD) :])
                    yield pa.table([*content.columns, *reasons.columns], schema=REJECTED)
                start += shard.rows

    def changed(self) -> Iterator[pa.Table]:
        """Yields CHANGED tables, phase by phase."""
        for shards in [] if self.whole else self.phases:
            for shard in shards:
                yield parquet.read_table(shard.folder / CHANGES, schema=CHANGED)

    def facts(self) -> Iterator[pa.Table]:
        """Yields FACT tables of the steps' measurements."""
        if self.whole:
            return
        for shards in self.phases:
            for shard in shards:
                yield parquet.read_table(shard.folder / FACTS, schema=FACT)
        yield parquet.read_table(self.folder / FACTS_FILE, schema=FACT)

    def states(self) -> dict[int, StepState]:
        """Reads the states that global steps left for a larger set."""
        return {
            int(index): StepState(
                entry["name"],
                entry["step"],
                entry["shards"],
                entry["alive"],
                parquet.read_table(self.folder / _state_file(int(index))),
            )
            for index, entry in self.meta.get("states", {}).items()
        }

    def previous_assignment(self) -> PreviousAssignment:
        """Reads the splits of all records that this version knows, for a version that grows from it."""
        if self.whole:
            return PreviousAssignment()
        unassigned = parquet.read_table(self.folder / _UNASSIGNED_FILE, schema=ASSIGNMENTS)
        states = self.meta["states"]
        index = next((index for index, entry in states.items() if entry["name"] == Split.name), None)
        if index is None:
            return PreviousAssignment(unassigned=unassigned)
        keys = states[index]["shards"]

        def phases() -> list[list[Shard]]:
            # The split may have met an earlier phase than the last: row steps after it write new shards.
            split = next(number for number, shards in enumerate(self.phases) if [shard.key for shard in shards] == keys)
            return self.phases[: split + 1]

        splits = parquet.read_table(self.folder / _state_file(int(index)), columns=["side"])["side"].to_numpy()
        return PreviousAssignment(phases, keys, splits, unassigned)

    def _shards(self, columns: Sequence[str] | None) -> Iterator[tuple[pa.Table, npt.NDArray[np.uint8]]]:
        """Yields RECORD tables (or some columns) with the split of every row, `EXCLUDED` for none."""
        if self.whole:
            table = parquet.read_table(self.folder / RECORDS_FILE, columns=columns)
            yield table, np.zeros(table.num_rows, dtype=np.uint8)
            return
        start = 0
        for shard in self.phases[-1]:
            row_splits = self.row_splits[start : start + shard.rows]
            start += shard.rows
            yield shard.records(columns), row_splits


def write_version(folder: Path, build: VersionBuild, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Fills ``folder`` with a version; the same content always gives the same bytes.

    Args:
        meta: Entries of `Version.meta` besides counts, funnel and states.

    Returns:
        The counts, for the artifact's meta.
    """
    row_splits = np.where(build.alive, build.splits, np.uint8(EXCLUDED)).astype(np.uint8)
    counts_by_split = {name: int((row_splits == index).sum()) for index, name in enumerate(meta["splits"])}
    num_read = build.funnel["read", "in"]
    counts = {
        "records": sum(counts_by_split.values()),
        "read": num_read,
        "rejected": build.num_rejected,
        "splits": counts_by_split,
    }
    # The order of the steps, not of the counts, makes the bytes independent of the engine's timing.
    order = ["read", *(step.name for step in build.steps)]
    entries = sorted(
        build.funnel.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1] != "in", entry[0][1])
    )
    funnel = [{"step": step, "reason": reason, "count": count} for (step, reason), count in entries]
    states = {
        str(index): {"name": state.name, "step": state.step, "shards": state.shards, "alive": state.alive}
        for index, state in sorted(build.states.items())
    }
    full = {
        **meta,
        "counts": counts,
        "funnel": [*funnel, {"step": "kept", "reason": "kept", "count": counts["records"]}],
    }
    # Sorted keys and fixed layout: the id is a hash of these bytes.
    text = json.dumps({**full, "states": states}, ensure_ascii=False, indent=1, sort_keys=True)
    (folder / META_FILE).write_text(text + "\n", encoding="utf-8")
    tables = {
        MANIFEST: pa.table({"side": row_splits}),
        DROPPED_FILE: concat(build.rejected, DROPPED),
        FACTS_FILE: concat(build.facts, FACT),
        _UNASSIGNED_FILE: concat([build.unassigned], ASSIGNMENTS),
        **{_state_file(index): state.table for index, state in build.states.items()},
    }
    for name, table in tables.items():
        parquet.write_table(table, folder / name, compression="zstd")
    return {"counts": counts, "splits": meta["splits"]}


def _state_file(index: int) -> str:
    """Returns the file name of the state of the step at ``index``."""
    return f"state-{index}.parquet"


@dataclass(frozen=True)
class Dataset:
    """Holds a version of one of the loop's small sets in memory.

    Attributes:
        records: RECORD table in input order.
        rejected: REJECTED table of the records that the build took out.
        meta: ``name``, ``counts`` (records, rejected), ``funnel``, ``parent`` (artifact id or None),
            ``increment`` (record ids added, by source) and ``filters`` (what the records went through).
    """

    records: pa.Table
    rejected: pa.Table = field(default_factory=REJECTED.empty_table)
    meta: dict[str, Any] = field(default_factory=dict)


def write_dataset(
    folder: Path, records: pa.Table, rejected: pa.Table | None = None, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Fills ``folder`` with a small set's version; the same content always gives the same bytes.

    Returns:
        ``meta`` with the ``counts`` of the tables.
    """
    rejected = REJECTED.empty_table() if rejected is None else rejected
    full = {**(meta or {}), "counts": {"records": records.num_rows, "rejected": rejected.num_rows}}
    text = json.dumps(full, ensure_ascii=False, indent=1, sort_keys=True)
    with disk_errors(folder):
        make_folder(folder)
        parquet.write_table(concat([records]), folder / RECORDS_FILE)
        parquet.write_table(concat([rejected], REJECTED), folder / REJECTED_FILE)
        (folder / META_FILE).write_text(text + "\n", encoding="utf-8")
    return full


def read_dataset(folder: Path) -> Dataset:
    """Reads the version that :func:`write_dataset` left in ``folder``."""
    return Dataset(
        parquet.read_table(folder / RECORDS_FILE, schema=RECORD),
        parquet.read_table(folder / REJECTED_FILE, schema=REJECTED),
        json.loads((folder / META_FILE).read_text(encoding="utf-8")),
    )
