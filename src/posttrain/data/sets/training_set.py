"""Builds the next training set: its parent's records and the new labels, as far as both still hold."""

import json
from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from posttrain.data.records.outcome import Outcome, Rejection, reject_rows
from posttrain.data.records.provenance import without_held_out_variants
from posttrain.data.records.record import CHANGED, RECORD, assign_ids, concat, locations
from posttrain.data.sets.record_set import RecordSet, Transform
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.duplicates import Conflicts, Exact
from posttrain.data.steps.step import DataStep
from posttrain.data.steps.validity import Answers
from posttrain.data.versions.version import Dataset


def next_training_set(
    parent: Dataset | None,
    increment: pa.Table,
    *,
    parent_id: str | None = None,
    labels: Sequence[str] | None = None,
    labelled: pa.Table | None = None,
    steps: Sequence[DataStep] = (),
    evaluation: pa.Table | None = None,
) -> Dataset:
    """Builds the next training set from the parent's records and newly labelled ones.

    Args:
        increment: RECORD table with answers; ids are computed again, so records labelled from the pool may
            still carry the pool's.
        parent_id: The parent's artifact id.
        labels: The closed label set. If given, an input with two answers loses all its records, including the parent's.
        labelled: RECORD table of what the labelled files hold now; what they answer otherwise, or no longer hold,
            is dropped (see `drop_outdated`). None keeps the parent's records.
        steps: The config's steps for the training set of every round; the parent's records go through them again, as
            files and evaluation records may have changed.
        evaluation: RECORD table of the evaluation records.
    """
    before = parent.records if parent is not None else RECORD.empty_table()
    filters: list[tuple[str, Transform]] = _numbered([step for step in steps if not step.training_only], evaluation)
    if labelled is not None:
        filters.append(("labelled files", drop_outdated(labelled)))
    filters += [("answers", partial(apply_step, Answers())), ("exact", partial(apply_step, Exact()))]
    if labels is not None:
        filters.append(("conflicts", partial(apply_step, Conflicts())))
    if evaluation is not None:
        variants = partial(without_held_out_variants, held_out=evaluation, changed=CHANGED.empty_table())
        filters.append(("split", variants))
    filters += _numbered([step for step in steps if step.training_only], evaluation)
    # Ids are derived from content, and the new answers have changed it.
    record_set = RecordSet("train", concat([before, assign_ids(increment)]))
    for name, function in filters:
        record_set.transform(name, function)
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
        "filters": [name for name, _ in filters],
        "funnel": record_set.full_funnel(),
        "counts": {"records": record_set.records.num_rows, "rejected": record_set.rejected.num_rows},
    }
    return Dataset(record_set.records.combine_chunks(), record_set.rejected, meta)


def _numbered(steps: Sequence[DataStep], evaluation: pa.Table | None) -> list[tuple[str, Transform]]:
    """Names each step, with a number from the second step of one name on."""
    names = [step.name for step in steps]
    counts = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [
        (f"{step.name} {count}" if count > 1 else step.name, partial(apply_step, step, evaluation=evaluation))
        for step, count in zip(steps, counts, strict=True)
    ]


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
                rejections[row] = Rejection("answered again", f"another answer stands at {inputs[input_id]}")
            # An annotator's answer is in no file, so its absence there means nothing.
            elif "labelled_by" not in json.loads(meta or "{}"):
                rejections[row] = Rejection("left the files", "no labelled file holds it any more")
        return reject_rows(table, "labelled files", rejections)

    return step
