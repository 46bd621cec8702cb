"""Builds the next training set: its parent's records and the new labels, as far as both still hold."""

import json
from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from posttrain.data.contamination.decontaminate import Decontaminate
from posttrain.data.records.identity import assign_ids
from posttrain.data.records.outcome import Outcome, Rejection, reject_rows
from posttrain.data.records.provenance import without_held_out_variants
from posttrain.data.records.schema import CHANGED, RECORD, concat, locations
from posttrain.data.sets.record_set import RecordSet, Transform
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.drop import Drop
from posttrain.data.steps.duplicates import Conflicts, Exact
from posttrain.data.steps.validity import Answers
from posttrain.data.versions.version import Dataset


def next_training_set(
    parent: Dataset | None,
    increment: pa.Table,
    *,
    parent_id: str | None = None,
    labels: Sequence[str] | None = None,
    labelled: pa.Table | None = None,
    decontaminate: Decontaminate | None = None,
    measured: pa.Table | None = None,
    drops: Sequence[Drop] = (),
) -> Dataset:
    """Builds the next training set from the parent's records and newly labelled ones.

    Args:
        increment: RECORD table with answers; ids are computed anew, so records labelled from the pool may
            still carry the pool's.
        parent_id: the parent's artifact id.
        labels: the closed label set. If given, an input with two answers loses all its records, including the parent's.
        labelled: RECORD table of what the labelled files hold now; what they answer otherwise, or no longer hold,
            is dropped (see `drop_outdated`). None keeps the parent's records.
        decontaminate: removes what gives away today's evaluation records, which may have changed since the parent.
        measured: RECORD table of that.
        drops: remove the records that files name, including the parent's.
    """
    before = parent.records if parent is not None else RECORD.empty_table()
    steps: dict[str, Transform | None] = {
        **{
            f"drop {number}" if number > 1 else "drop": partial(apply_step, drop)
            for number, drop in enumerate(drops, 1)
        },
        "labelled files": drop_outdated(labelled) if labelled is not None else None,
        "answers": partial(apply_step, Answers()),
        "exact": partial(apply_step, Exact()),
        "conflicts": partial(apply_step, Conflicts()) if labels is not None else None,
        "split": partial(without_held_out_variants, held_out=measured, changed=CHANGED.empty_table())
        if measured is not None
        else None,
        "decontaminate": partial(apply_step, decontaminate, evaluation=measured) if decontaminate else None,
    }
    # Ids are derived from content, and the new answers have changed it.
    record_set = RecordSet("train", concat([before, assign_ids(increment)]))
    for step in steps.values():
        if step is not None:
            record_set.transform(step)
    inherited = set(before["id"].to_pylist())
    added: dict[str, list[str]] = {}
    for identity, source in zip(
        record_set.records["id"].to_pylist(), record_set.records["source"].to_pylist(), strict=True
    ):
        if identity not in inherited:
            added.setdefault(source, []).append(identity)
    meta = {
        "name": record_set.name,
        "parent": parent_id,
        "increment": added,
        "filters": [name for name, step in steps.items() if step is not None],
        "funnel": record_set.full_funnel(),
        "counts": {"records": record_set.records.num_rows, "rejected": record_set.rejected.num_rows},
    }
    return Dataset(record_set.records.combine_chunks(), record_set.rejected, meta)


def drop_outdated(labelled: pa.Table) -> Transform:
    """Returns a function that rejects records that the labelled files answer otherwise now, or no longer hold.

    Records that an annotator answered stay, unless a labelled file holds their input with another answer.

    Args:
        labelled: RECORD table of what the labelled files hold now.
    """
    current = set(labelled["id"].to_pylist())
    inputs = dict(zip(labelled["input_id"].to_pylist(), locations(labelled), strict=True))

    def step(table: pa.Table) -> Outcome:
        rejections: dict[int, Rejection] = {}
        columns = (table[name].to_pylist() for name in ("id", "input_id", "meta"))
        for row, (identity, input_id, meta) in enumerate(zip(*columns, strict=True)):
            if identity in current:
                continue
            if input_id in inputs:
                rejections[row] = Rejection("answered anew", f"another answer stands at {inputs[input_id]}")
            # An annotator's answer stands in no file, so its absence there means nothing.
            elif "labelled_by" not in json.loads(meta or "{}"):
                rejections[row] = Rejection("left the files", "no labelled file holds it any more")
        return reject_rows(table, "labelled files", rejections)

    return step
