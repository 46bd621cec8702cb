"""What a search for contamination leaves for the time when there are more records."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.contamination.index import Findings
from posttrain.data.steps.step import Rejection

_LOOKED_FOR = b"evaluation"
_KEY_BYTES = 16
_REJECTION = [
    ("reason", pa.string()),
    ("detail", pa.string()),
    ("score", pa.float64()),
    ("kept", pa.string()),
]


@dataclass(frozen=True)
class Remembered:
    """What an earlier search found, told by today's evaluation records.

    Attributes:
        seen: bool [K], the training records that it looked at.
        fresh: bool [T], the evaluation records that it did not look for.
        findings: of the rows seen.
    """

    seen: npt.NDArray[np.bool_]
    fresh: npt.NDArray[np.bool_]
    findings: Findings


def state_of(seen: npt.NDArray[np.bool_], findings: Findings, evaluation: pa.Table) -> pa.Table:
    """One row a training record, with the evaluation records in the metadata.

    Args:
        seen: bool [N], the records that were looked at.
        findings: all of them.
        evaluation: RECORD table of what was looked for.
    """
    why = dict(sorted(findings.rejections.items()))
    others: dict[int, set[int]] = {}
    for row, other in findings.pairs:
        others.setdefault(row, set()).add(other)
    columns = {
        name: _scattered(why, pa.array([getattr(one, name) for one in why.values()], kind), len(seen))
        for name, kind in _REJECTION
    }
    lists = pa.array([sorted(found) for found in others.values()], pa.list_(pa.int32()))
    columns["others"] = _scattered(others, lists, len(seen))
    return pa.table({"seen": pa.array(seen), **columns}).replace_schema_metadata(
        {_LOOKED_FOR: b"".join(_keys(evaluation)).hex()}
    )


def _scattered(rows: Iterable[int], values: pa.Array, count: int) -> pa.Array:
    """``count`` values: those given at their rows, null at all others."""
    place = np.full(count, -1, dtype=np.int64)
    place[list(rows)] = np.arange(len(values))
    return values.take(pa.array(place, mask=place < 0))


def remembered(state: pa.Table, evaluation: pa.Table) -> Remembered | None:
    """What `state_of` kept; None if not all evaluation records of then are among today's."""
    looked_for = bytes.fromhex((state.schema.metadata or {}).get(_LOOKED_FOR, b"").decode())
    then = [looked_for[start : start + _KEY_BYTES] for start in range(0, len(looked_for), _KEY_BYTES)]
    now = {key: row for row, key in enumerate(_keys(evaluation))}
    if len(now) < evaluation.num_rows or len(set(then)) < len(then) or not now.keys() >= set(then):
        return None
    fresh = np.ones(evaluation.num_rows, dtype=bool)
    place = [now[key] for key in then]
    fresh[place] = False
    rows = np.flatnonzero(state["reason"].is_valid().to_numpy())
    found = state.select([name for name, _ in _REJECTION]).take(pa.array(rows)).to_pylist()
    rejections = {row: Rejection(**values) for row, values in zip(rows.tolist(), found, strict=True)}
    paired = np.flatnonzero(state["others"].is_valid().to_numpy())
    lists = state["others"].take(pa.array(paired)).to_pylist()
    pairs = [(row, place[other]) for row, others in zip(paired.tolist(), lists, strict=True) for other in others]
    return Remembered(np.array(state["seen"].to_numpy(), dtype=bool), fresh, Findings(rejections, pairs))


def _keys(evaluation: pa.Table) -> list[bytes]:
    """What a finding tells of each record, as 16 bytes."""
    columns = (evaluation[name].to_pylist() for name in ("id", "group", "source", "line"))
    return [
        hashlib.blake2b(repr(values).encode(), digest_size=_KEY_BYTES).digest() for values in zip(*columns, strict=True)
    ]
