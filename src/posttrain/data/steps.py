"""What a step of the data pipeline is, and the count of what the steps do to one set of records."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.data.schema import REJECTED, concat

Step = Callable[[pa.Table], tuple[pa.Table, pa.Table]]
"""Parts a RECORD table into what it keeps (RECORD) and what it rejects (REJECTED), both in table order."""


@dataclass(frozen=True)
class Rejection:
    """Why a record goes: ``reason`` is one of few and is counted, ``detail`` tells of this record."""

    reason: str
    detail: str


def part(table: pa.Table, step: str, rejections: Mapping[int, Rejection]) -> tuple[pa.Table, pa.Table]:
    """``table`` without the rows in ``rejections``, and those rows with the reasons; both in table order."""
    rows = sorted(rejections)
    keep = np.ones(table.num_rows, dtype=bool)
    keep[rows] = False
    gone = table.take(pa.array(rows, pa.int64()))
    columns = [
        pa.array([step] * len(rows), pa.string()),
        pa.array([rejections[row].reason for row in rows], pa.string()),
        pa.array([rejections[row].detail for row in rows], pa.string()),
    ]
    return table.filter(pa.array(keep)), pa.table([*gone.columns, *columns], schema=REJECTED)


def places(table: pa.Table) -> list[str]:
    """``file:line`` of every record."""
    return [
        f"{source}:{line}" for source, line in zip(table["source"].to_pylist(), table["line"].to_pylist(), strict=True)
    ]


class Flow:
    """One named set of records on its way through the steps. ``records`` is what is left of it."""

    def __init__(self, name: str, records: pa.Table) -> None:
        self.name = name
        self.records = records
        self.funnel: list[dict[str, Any]] = [self._entry("read", "in", records.num_rows)]
        self._rejected: list[pa.Table] = []

    def through(self, step: Step) -> None:
        """Keep what ``step`` keeps; count and remember what it rejects."""
        self.records, rejected = step(self.records)
        self._rejected.append(rejected)
        names = zip(rejected["step"].to_pylist(), rejected["reason"].to_pylist(), strict=True)
        self.funnel += [self._entry(name, reason, count) for (name, reason), count in Counter(names).items()]

    def move(self, records: pa.Table, step: str, reason: str) -> None:
        """Go on with ``records``; those that are missing went to another set and are not rejected."""
        self.funnel.append(self._entry(step, reason, self.records.num_rows - records.num_rows))
        self.records = records

    def close(self) -> list[dict[str, Any]]:
        """The funnel, from ``in`` to ``kept``; what lies between adds up to the difference."""
        return [*self.funnel, self._entry("kept", "kept", self.records.num_rows)]

    @property
    def rejected(self) -> pa.Table:
        """REJECTED table of all that the steps took out, step by step."""
        return concat(self._rejected, REJECTED)

    def _entry(self, step: str, reason: str, count: int) -> dict[str, Any]:
        return {"set": self.name, "step": step, "reason": reason, "count": count}
