"""Keeps the splits that records had in earlier versions, whatever shards, recipe or rows they had there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.arrays import Splits
from posttrain.data.records.provenance import original_ids
from posttrain.data.versions.shards import CHANGES, Shard

Phases = Sequence[Sequence[Shard]]

ASSIGNMENTS: pa.Schema = pa.schema(
    [("id", pa.string()), ("input_id", pa.string()), ("root", pa.string()), ("side", pa.int8())]
)
"""A record's split by its identities; ``root`` is the id that it was read with, before any step changed it."""

_UNASSIGNED = -1


@dataclass(frozen=True)
class PreviousAssignment:
    """Holds the splits of the rows that a version's split step saw, and of the records lost before.

    Attributes:
        phases: Returns its shards, phase by phase, up to the one that was split; called only if today's shards differ.
        shards: Keys of the shards that were split.
        splits: int8 [K], split of each row of these shards; -1 for none.
        unassigned: ASSIGNMENTS table of records that an earlier version assigned and that are not among these rows.
    """

    phases: Callable[[], Phases] = tuple
    shards: Sequence[str] = ()
    splits: Splits = field(default_factory=lambda: np.empty(0, np.int8))
    unassigned: pa.Table = field(default_factory=ASSIGNMENTS.empty_table)

    def splits_of(self, phases: Phases, alive: npt.NDArray[np.bool_]) -> Splits:
        """Finds the split that the records of the last phase had, int8 [N]; -1 for none.

        A record is recognised by its id, else by its input (its answer changed), else by its root (a step changed it).

        Args:
            alive: bool [N].
        """
        splits = np.full(len(alive), _UNASSIGNED, dtype=np.int8)
        # Row by row is exact and needs no identities, which take a pass over all shards.
        if self._begins(phases):
            splits[: len(self.splits)] = self.splits
        missing = np.flatnonzero((splits == _UNASSIGNED) & alive)
        assignments = self._not_among(phases, alive)
        if assignments.num_rows and len(missing):
            splits[missing] = _find_splits(_row_identities(phases, missing), assignments)
        return splits

    def unassigned_now(self, phases: Phases, splits: Splits) -> pa.Table:
        """Finds the records that had a split and have none among the rows of the last phase.

        Args:
            splits: int8 [N], as they are now.

        Returns:
            ASSIGNMENTS table, by id.
        """
        missing = self._not_among(phases, splits != _UNASSIGNED)
        # A record that a rewriting step or a moved file gave a new row has not been lost.
        if missing.num_rows:
            present = _row_identities(phases, np.flatnonzero(splits != _UNASSIGNED), with_roots=False)
            missing = missing.filter(compute.invert(compute.is_in(missing["id"], value_set=present["id"])))
        # Ids are unique and sorted present, so that the file is the same in whatever order versions grew.
        _, first = np.unique(np.asarray(missing["id"].to_pylist(), dtype="S20"), return_index=True)
        return missing.take(pa.array(first)).combine_chunks()

    def table(self) -> pa.Table:
        """Builds the ASSIGNMENTS table of all records; an id may occur more than once, always with one split."""
        rows = np.flatnonzero(self.splits != _UNASSIGNED)
        return self._with_unassigned(self.phases(), rows) if len(rows) else self.unassigned

    def _begins(self, phases: Phases) -> bool:
        """Returns True if today's rows begin with those of the earlier version."""
        # Keys cover content and steps: with equal keys row numbers mean the same records.
        return [shard.key for shard in phases[-1][: len(self.shards)]] == list(self.shards)

    def _not_among(self, phases: Phases, present: npt.NDArray[np.bool_]) -> pa.Table:
        """Builds the ASSIGNMENTS table of all records, except rows that have not moved.

        Args:
            present: bool [N], the rows that count.
        """
        if not self._begins(phases):
            return self.table()
        return self._with_unassigned(
            phases, np.flatnonzero((self.splits != _UNASSIGNED) & ~present[: len(self.splits)])
        )

    def _with_unassigned(self, phases: Phases, rows: npt.NDArray[np.int64]) -> pa.Table:
        """Builds the ASSIGNMENTS table of these rows and of the unassigned records."""
        if not len(rows):
            return self.unassigned
        assigned = _row_identities(phases, rows).append_column(ASSIGNMENTS.field("side"), pa.array(self.splits[rows]))
        return pa.concat_tables([assigned, self.unassigned])


def _row_identities(phases: Phases, rows: npt.NDArray[np.int64], with_roots: bool = True) -> pa.Table:
    """Reads ``id``, ``input_id`` and, on request, ``root`` of rows of the last phase."""
    starts = np.concatenate([[0], np.cumsum([shard.rows for shard in phases[-1]])])
    empty = pa.table({"id": pa.array([], pa.string()), "input_id": pa.array([], pa.string())})
    tables = [empty]
    for shard, start, end in zip(phases[-1], starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        inside = rows[(rows >= start) & (rows < end)] - start
        if len(inside):
            tables.append(shard.records(["id", "input_id"]).take(pa.array(inside)))
    identities = pa.concat_tables(tables)
    return (
        identities.append_column("root", original_ids(identities["id"], id_changes(phases)))
        if with_roots
        else identities
    )


def id_changes(phases: Phases) -> pa.Table:
    """Reads ``id`` and ``before`` of the CHANGED tables of all these shards."""
    files = [shard.folder / CHANGES for shards in phases for shard in shards]
    return pa.concat_tables([parquet.read_table(file, columns=["id", "before"]) for file in files])


def _find_splits(records: pa.Table, assignments: pa.Table) -> Splits:
    """Looks up the split of each record in an ASSIGNMENTS table: int8 [N], -1 for none."""
    splits = np.full(records.num_rows, _UNASSIGNED, dtype=np.int8)
    assigned_splits = assignments["side"].to_numpy()
    for name in ("root", "input_id", "id"):  # the id comes last, as it overrides the others
        index = compute.index_in(records[name], value_set=assignments[name])
        hit = np.asarray(index.is_valid())
        splits[hit] = assigned_splits[np.asarray(index.drop_null())]
    return splits
