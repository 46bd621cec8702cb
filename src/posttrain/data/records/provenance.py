"""Reads from a record's ``meta`` how it came about: its kind, and the records that it derives from."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.records.outcome import Outcome, Rejection, reject_rows

HARD_NEGATIVE = "hard_negative"
"""Key of the ``meta`` of a pair whose rejected answer is the label of a hard negative."""

PSEUDO = "pseudo"
"""Key of a pseudo-label's ``meta``: its teacher, confidence and weight, and ``targets`` where it is soft."""

RECORD_KINDS = {
    "files": "from files",
    "labelled": "labelled",
    "user_feedback": "user feedback",
    "synthetic": "synthetic",
    "hard_negatives": "hard negatives",
    "pseudo_labels": "pseudo-labels",
}
"""The kinds of records, by how they came about, with their names in texts: labelled are those of a round's batch."""

_DERIVED = '"(augmented|synthetic)"'

_MARKED = rf'"(augmented|synthetic|labelled_by|feedback|{HARD_NEGATIVE}|{PSEUDO})"'

_MAX_CHANGES = 64  # of one record; bounds the loops, as two steps that undo each other make a cycle of ids


def origin_ids(table: pa.Table) -> pa.Array:
    """Returns the id of the record that each record derives from, string [N].

    ``""`` for a record that derives from several, null for an original.
    """
    metas = table["meta"].combine_chunks()
    # One regular expression over the column first: parsing the JSON of every record would be far slower.
    marked = np.flatnonzero(compute.match_substring_regex(metas, _DERIVED).fill_null(False))
    origins: list[str | None] = [None] * table.num_rows
    for row in marked.tolist():
        origins[row] = _origin(metas[row].as_py())
    return pa.array(origins, pa.string())


def record_kinds(metas: pa.ChunkedArray) -> list[str]:
    """Returns the kind of each record, one of `RECORD_KINDS`.

    A record with marks of several is of the last one in the order of `RECORD_KINDS`; but feedback without an answer
    that was labelled since is ``labelled``.

    Args:
        metas: The column ``meta``, string [N].
    """
    # One regular expression over the column first, as in `origin_ids`.
    marked = compute.match_substring_regex(metas, _MARKED).fill_null(False).to_pylist()
    return [_kind(meta) if mark else "files" for meta, mark in zip(metas.to_pylist(), marked, strict=True)]


def without_held_out_variants(table: pa.Table, held_out: pa.Table, changed: pa.Table) -> Outcome:
    """Rejects training records that derive from a held-out record; both are RECORD tables.

    Args:
        changed: CHANGED table of the changes that steps have made to either.
    """
    # By the present id: the origin may have been rewritten since the variant was made of it.
    ids = set(held_out["id"].to_pylist())
    rejections = {
        row: Rejection("made of a test record", f"made of {origin}", kept=origin)
        for row, origin in enumerate(
            current_ids(pa.chunked_array([origin_ids(table)]), changed, held_out["id"]).to_pylist()
        )
        if origin in ids
    }
    return reject_rows(table, "split", rejections)


def origin_events(meta: str | None) -> list[dict[str, Any]]:
    """Returns the events of a derived record's history: the model or method that made it, and from which records.

    Each event has ``step``, ``what`` and ``method``, and either ``model`` and ``seeds`` or ``of``.
    """
    values = json.loads(meta or "{}")
    events: list[dict[str, Any]] = []
    if isinstance(marks := values.get("synthetic"), dict) and isinstance(marks.get("seeds"), list):
        what = f"{marks.get('method')} by {marks.get('model')}, from {', '.join(map(str, marks['seeds']))}"
        details = {name: marks.get(name) for name in ("method", "model", "seeds")}
        events.append({"step": "synthesize", "what": what, **details})
    if isinstance(marks := values.get("augmented"), dict) and "of" in marks:
        what = f"{marks.get('method')}, a variant of {marks['of']}"
        events.append({"step": "augment", "what": what, "method": marks.get("method"), "of": marks["of"]})
    return events


def _kind(meta: str) -> str:
    values = json.loads(meta)
    # By the type of the mark, since a user's own column may have the same name.
    if isinstance(values.get(PSEUDO), dict):
        return "pseudo_labels"
    if isinstance(values.get(HARD_NEGATIVE), dict):
        return "hard_negatives"
    if _origin(meta) is not None:
        return "synthetic"
    if isinstance(values.get("labelled_by"), dict):
        return "labelled"
    return "user_feedback" if isinstance(values.get("feedback"), dict) else "files"


def _origin(meta: str) -> str | None:
    values = json.loads(meta)
    variant, synthetic = values.get("augmented"), values.get("synthetic")
    if isinstance(variant, dict) and isinstance(variant.get("of"), str):
        return str(variant["of"])
    seeds = synthetic.get("seeds") if isinstance(synthetic, dict) else None
    if not isinstance(seeds, list):
        return None  # a column of the user's own
    return seeds[0] if len(seeds) == 1 and isinstance(seeds[0], str) else ""


def original_ids(ids: pa.ChunkedArray, changed: pa.Table) -> pa.ChunkedArray:
    """Returns the id with which each record was read, string [N]; one of several where steps made them equal.

    Args:
        changed: CHANGED table of all steps; a record that was derived from another gets the other's id.
    """
    for _ in range(_MAX_CHANGES if changed.num_rows else 0):
        at = compute.index_in(ids, value_set=changed["id"])
        if at.null_count == len(at):
            break
        ids = compute.coalesce(changed["before"].take(at), ids)
    return ids


def current_ids(ids: pa.ChunkedArray, changed: pa.Table, present: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns the present id of each record, string [N], given one that it had before or between two steps.

    Args:
        changed: CHANGED table of the steps.
        present: Ids that records have now, which map to themselves.
    """
    for _ in range(_MAX_CHANGES if changed.num_rows else 0):
        at = compute.index_in(ids, value_set=changed["before"])
        at = compute.if_else(compute.is_in(ids, value_set=present), pa.scalar(None, at.type), at)
        if at.null_count == len(at):
            break
        ids = compute.coalesce(changed["id"].take(at), ids)
    return ids
