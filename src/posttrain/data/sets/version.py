"""Dataset versions: immutable sets of records that know their parent and what they added."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from posttrain.data.alone import apply
from posttrain.data.records.made import apart_from
from posttrain.data.records.normalise import identify
from posttrain.data.records.schema import CHANGED, RECORD, REJECTED, concat
from posttrain.data.sets.flow import Flow, Work
from posttrain.data.sets.outdated import outdated
from posttrain.data.steps.answers import Answers
from posttrain.data.steps.conflicts import Conflicts
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.steps.drop import Drop
from posttrain.data.steps.exact import Exact
from posttrain.store.files import writing

RECORDS_FILE = "records.parquet"
REJECTED_FILE = "rejected.parquet"
META_FILE = "dataset.json"


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
    with writing(folder):
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


def training_version(
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
    """The next training set: the parent's records and newly labelled ones, as far as they still hold.

    Args:
        increment: RECORD table with answers; ids are computed anew, so records labelled from the pool may
            still carry the pool's.
        parent_id: the parent's artifact id.
        labels: the closed label set. Where it is given, an input with two answers loses all its records,
            the parent's too.
        labelled: RECORD table of what the labelled files hold now; what they answer otherwise, or no longer hold,
            leaves (see `outdated`). None leaves the parent's records as they are.
        decontaminate: takes out what gives away what is measured on at present, which may have changed since the
            parent.
        measured: RECORD table of that.
        drops: take out what files name, of the parent's records too.
    """
    before = parent.records if parent is not None else RECORD.empty_table()
    steps: dict[str, Work | None] = {
        **{f"drop {number}" if number > 1 else "drop": partial(apply, drop) for number, drop in enumerate(drops, 1)},
        "labelled files": outdated(labelled) if labelled is not None else None,
        "answers": partial(apply, Answers()),
        "exact": partial(apply, Exact()),
        "conflicts": partial(apply, Conflicts()) if labels is not None else None,
        "split": partial(apart_from, held_out=measured, changed=CHANGED.empty_table())
        if measured is not None
        else None,
        "decontaminate": partial(apply, decontaminate, evaluation=measured) if decontaminate else None,
    }
    flow = Flow("train", concat([before, identify(increment)]))
    for step in steps.values():
        if step is not None:
            flow.through_work(step)
    inherited = set(before["id"].to_pylist())
    added: dict[str, list[str]] = {}
    for identity, source in zip(flow.records["id"].to_pylist(), flow.records["source"].to_pylist(), strict=True):
        if identity not in inherited:
            added.setdefault(source, []).append(identity)
    meta = {
        "name": flow.name,
        "parent": parent_id,
        "increment": added,
        "filters": [name for name, step in steps.items() if step is not None],
        "funnel": flow.close(),
        "counts": {"records": flow.records.num_rows, "rejected": flow.rejected.num_rows},
    }
    return Dataset(flow.records.combine_chunks(), flow.rejected, meta)
