"""Records derived from other records (augmented, synthetic, rewritten): their origins and ids."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.records.outcome import Outcome, Rejection, reject_rows

_DERIVED = '"(augmented|synthetic)"'

_MAX_CHANGES = 64  # of one record; its ids could go round in a circle


def origin_ids(table: pa.Table) -> pa.Array:
    """String [N]: the id of the one record that each was made of, ``""`` where it was several; null for an original."""
    metas = table["meta"].combine_chunks()
    marked = np.flatnonzero(compute.match_substring_regex(metas, _DERIVED).fill_null(False))
    found: list[str | None] = [None] * table.num_rows
    for row in marked.tolist():
        found[row] = _origin(metas[row].as_py())
    return pa.array(found, pa.string())


def without_held_out_variants(table: pa.Table, held_out: pa.Table, changed: pa.Table) -> Outcome:
    """Training records without those that were made of a held-out one; both are RECORD tables.

    Args:
        changed: CHANGED table of what steps have done to either.
    """
    ids = set(held_out["id"].to_pylist())
    gone = {
        row: Rejection("made of a test record", f"made of {origin}", kept=origin)
        for row, origin in enumerate(
            current_ids(pa.chunked_array([origin_ids(table)]), changed, held_out["id"]).to_pylist()
        )
        if origin in ids
    }
    return reject_rows(table, "split", gone)


def origin_events(meta: str | None) -> list[dict[str, Any]]:
    """How a record was made that no one wrote, as events of its story: by which model or method, and of which records.

    Each has ``step`` and ``what``, and as marked ``method``, and ``model`` and ``seeds`` or ``of``.
    """
    said = json.loads(meta or "{}")
    events: list[dict[str, Any]] = []
    if isinstance(marks := said.get("synthetic"), dict) and isinstance(marks.get("seeds"), list):
        what = f"{marks.get('method')} by {marks.get('model')}, from {', '.join(map(str, marks['seeds']))}"
        told = {name: marks.get(name) for name in ("method", "model", "seeds")}
        events.append({"step": "synthesize", "what": what, **told})
    if isinstance(marks := said.get("augmented"), dict) and "of" in marks:
        what = f"{marks.get('method')}, a variant of {marks['of']}"
        events.append({"step": "augment", "what": what, "method": marks.get("method"), "of": marks["of"]})
    return events


def _origin(meta: str) -> str | None:
    said = json.loads(meta)
    variant, synthetic = said.get("augmented"), said.get("synthetic")
    if isinstance(variant, dict) and isinstance(variant.get("of"), str):
        return str(variant["of"])
    seeds = synthetic.get("seeds") if isinstance(synthetic, dict) else None
    if not isinstance(seeds, list):
        return None  # a column of the user's own
    return seeds[0] if len(seeds) == 1 and isinstance(seeds[0], str) else ""


def original_ids(ids: pa.ChunkedArray, changed: pa.Table) -> pa.ChunkedArray:
    """The id with which each record was read: string [N]; one of several where steps have made them the same.

    Args:
        changed: CHANGED table of all that steps have done; what they made of another record has the other's.
    """
    for _ in range(_MAX_CHANGES if changed.num_rows else 0):
        at = compute.index_in(ids, value_set=changed["id"])
        if at.null_count == len(at):
            break
        ids = compute.coalesce(changed["before"].take(at), ids)
    return ids


def current_ids(ids: pa.ChunkedArray, changed: pa.Table, present: pa.ChunkedArray) -> pa.ChunkedArray:
    """The id that each record has now, string [N], by one that it had before or between two steps.

    Args:
        changed: CHANGED table of what steps have rewritten.
        present: ids that records have now; these stand for themselves.
    """
    for _ in range(_MAX_CHANGES if changed.num_rows else 0):
        at = compute.index_in(ids, value_set=changed["before"])
        at = compute.if_else(compute.is_in(ids, value_set=present), pa.scalar(None, at.type), at)
        if at.null_count == len(at):
            break
        ids = compute.coalesce(changed["id"].take(at), ids)
    return ids
