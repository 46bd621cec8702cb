"""Holds one named set of records in memory, applies steps to it, and counts what they do."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa

from posttrain.data.records.outcome import Outcome
from posttrain.data.records.record import CHANGED, REJECTED, concat
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.step import DataStep

Transform = Callable[[pa.Table], Outcome]
"""Splits a RECORD table into kept and rejected records."""


class RecordSet:
    """Holds one named set of records; ``records`` are those that the steps kept."""

    def __init__(self, name: str, records: pa.Table) -> None:
        self.name = name
        self.records = records
        self.funnel: list[dict[str, Any]] = [self._entry("read", "in", records.num_rows)]
        self._rejected: list[pa.Table] = []
        self._changed: list[pa.Table] = []

    def apply_steps(self, *steps: DataStep, evaluation: pa.Table | None = None) -> None:
        """Runs the steps; counts and keeps what they reject.

        Args:
            evaluation: RECORD table of what models are measured on.
        """
        for step in steps:
            self.transform(step.name, partial(apply_step, step, evaluation=evaluation))

    def transform(self, step: str, function: Transform) -> None:
        """Runs a function; counts and keeps what it rejects.

        Args:
            step: Name under which records that the function adds are counted.
        """
        before = self.records.num_rows
        self.records, rejected, changed, _ = function(self.records)
        self._rejected.append(rejected)
        self._changed.append(changed)
        names = zip(rejected["step"].to_pylist(), rejected["reason"].to_pylist(), strict=True)
        self.funnel += [self._entry(name, reason, count) for (name, reason), count in Counter(names).items()]
        # Steps may add rows; a negative entry keeps the funnel's sum right.
        if added := self.records.num_rows + rejected.num_rows - before:
            self.funnel.append(self._entry(step, "added", -added))

    def replace(self, records: pa.Table, step: str, reason: str) -> None:
        """Continues with ``records``; the missing ones moved to another set and are not rejected."""
        self.funnel.append(self._entry(step, reason, self.records.num_rows - records.num_rows))
        self.records = records

    def full_funnel(self) -> list[dict[str, Any]]:
        """Returns the funnel from ``in`` to ``kept``; the entries between add up to the difference."""
        return [*self.funnel, self._entry("kept", "kept", self.records.num_rows)]

    @property
    def rejected(self) -> pa.Table:
        """REJECTED table of all rejected records, step by step."""
        return concat(self._rejected, REJECTED)

    @property
    def changed(self) -> pa.Table:
        """CHANGED table of all rewritten or added records, step by step."""
        return concat(self._changed, CHANGED)

    def _entry(self, step: str, reason: str, count: int) -> dict[str, Any]:
        return {"set": self.name, "step": step, "reason": reason, "count": count}
