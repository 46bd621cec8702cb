"""The splits that records had in earlier versions, whatever shards, recipe or rows they had there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from posttrain.data.records.provenance import original_ids
from posttrain.data.versions.shards import CHANGES, Shard

Splits = npt.NDArray[np.int8]
Phases = Sequence[Sequence[Shard]]

ASSIGNMENTS: pa.Schema = pa.schema(
    [("id", pa.string()), ("input_id", pa.string()), ("root", pa.string()), ("side", pa.int8())]
)
"""A record's side by its identities; ``root`` is the id that it was read with, before any step changed it."""

_UNASSIGNED = -1


@dataclass(frozen=True)
class PreviousAssignment:
    """What a version knows of sides: of the rows that its split met, and of the records that had gone before.

    Attributes:
        phases: gives its shards, phase by phase, up to the one that was split; asked only where today's are others.
        shards: keys of the shards that were split.
        side: int8 [K], by row of these shards; -1 for none.
        gone: SIDES table of what versions before gave a side, and what has none among these rows.
    """

    phases: Callable[[], Phases] = tuple
    shards: Sequence[str] = ()
    side: Splits = field(default_factory=lambda: np.empty(0, np.int8))
    gone: pa.Table = field(default_factory=ASSIGNMENTS.empty_table)

    def of(self, phases: Phases, alive: npt.NDArray[np.bool_]) -> Splits:
        """Int8 [N]: the side that the records of the last phase had; -1 for none.

        A record is known again by its id, else by its input (its answer is another now), else by its root (steps have
        changed it now, or had then).

        Args:
            alive: bool [N].
        """
        found = np.full(len(alive), _UNASSIGNED, dtype=np.int8)
        if self._begins(phases):
            found[: len(self.side)] = self.side
        asked = np.flatnonzero((found == _UNASSIGNED) & alive)
        known = self._not_among(phases, alive)
        if known.num_rows and len(asked):
            found[asked] = _find_splits(_row_identities(phases, asked), known)
        return found

    def left(self, phases: Phases, side: Splits) -> pa.Table:
        """SIDES table, by id, of the records that had a side and have none among the rows of the last phase.

        Args:
            side: int8 [N], as it is now.
        """
        left = self._not_among(phases, side != _UNASSIGNED)
        if left.num_rows:
            now = _row_identities(phases, np.flatnonzero(side != _UNASSIGNED), with_roots=False)
            left = left.filter(compute.invert(compute.is_in(left["id"], value_set=now["id"])))
        _, first = np.unique(np.asarray(left["id"].to_pylist(), dtype="S20"), return_index=True)
        return left.take(pa.array(first)).combine_chunks()

    def table(self) -> pa.Table:
        """SIDES table of all that is known; an id may stand in it more than once, always with one side."""
        rows = np.flatnonzero(self.side != _UNASSIGNED)
        return self._with_gone(self.phases(), rows) if len(rows) else self.gone

    def _begins(self, phases: Phases) -> bool:
        """Whether today's rows begin with those of then."""
        return [shard.key for shard in phases[-1][: len(self.shards)]] == list(self.shards)

    def _not_among(self, phases: Phases, here: npt.NDArray[np.bool_]) -> pa.Table:
        """All that is known, less what stands in the same row as then; ``here``: bool [N], the rows that count."""
        if not self._begins(phases):
            return self.table()
        return self._with_gone(phases, np.flatnonzero((self.side != _UNASSIGNED) & ~here[: len(self.side)]))

    def _with_gone(self, phases: Phases, rows: npt.NDArray[np.int64]) -> pa.Table:
        if not len(rows):
            return self.gone
        found = _row_identities(phases, rows).append_column(ASSIGNMENTS.field("side"), pa.array(self.side[rows]))
        return pa.concat_tables([found, self.gone])


def _row_identities(phases: Phases, rows: npt.NDArray[np.int64], with_roots: bool = True) -> pa.Table:
    """``id``, ``input_id`` and, if asked, ``root`` of rows of the last phase."""
    starts = np.concatenate([[0], np.cumsum([shard.rows for shard in phases[-1]])])
    empty = pa.table({"id": pa.array([], pa.string()), "input_id": pa.array([], pa.string())})
    tables = [empty]
    for shard, start, end in zip(phases[-1], starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        inside = rows[(rows >= start) & (rows < end)] - start
        if len(inside):
            tables.append(shard.records(["id", "input_id"]).take(pa.array(inside)))
    found = pa.concat_tables(tables)
    return found.append_column("root", original_ids(found["id"], id_changes(phases))) if with_roots else found


def id_changes(phases: Phases) -> pa.Table:
    """``id`` and ``before`` of the CHANGED tables of all these shards."""
    files = [shard.folder / CHANGES for shards in phases for shard in shards]
    return pa.concat_tables([parquet.read_table(file, columns=["id", "before"]) for file in files])


def _find_splits(records: pa.Table, known: pa.Table) -> Splits:
    """Int8 [N]: the side of each record in a SIDES table, -1 for none."""
    found = np.full(records.num_rows, _UNASSIGNED, dtype=np.int8)
    sides = known["side"].to_numpy()
    for name in ("root", "input_id", "id"):  # the last word is the id's
        at = compute.index_in(records[name], value_set=known[name])
        hit = np.asarray(at.is_valid())
        found[hit] = sides[np.asarray(at.drop_null())]
    return found
