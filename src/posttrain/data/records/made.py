"""Records that were made of others, as marks in ``meta`` tell: variants (``augmented``) and ``synthetic`` ones."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.records.renamed import last_ids
from posttrain.data.steps.step import Outcome, Rejection, part

_MARKED = '"(augmented|synthetic)"'


def made_of(table: pa.Table) -> pa.Array:
    """String [N]: the id of the one record that each was made of, ``""`` where it was several; null for an original."""
    metas = table["meta"].combine_chunks()
    marked = np.flatnonzero(compute.match_substring_regex(metas, _MARKED).fill_null(False))
    found: list[str | None] = [None] * table.num_rows
    for row in marked.tolist():
        found[row] = _origin(metas[row].as_py())
    return pa.array(found, pa.string())


def apart_from(table: pa.Table, held_out: pa.Table, changed: pa.Table) -> Outcome:
    """Training records without those that were made of a held-out one; both are RECORD tables.

    Args:
        changed: CHANGED table of what steps have done to either.
    """
    ids = set(held_out["id"].to_pylist())
    gone = {
        row: Rejection("made of a test record", f"made of {origin}", kept=origin)
        for row, origin in enumerate(last_ids(pa.chunked_array([made_of(table)]), changed, held_out["id"]).to_pylist())
        if origin in ids
    }
    return part(table, "split", gone)


def written_by(meta: str | None) -> list[dict[str, Any]]:
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
