"""One named set of records in memory: apply steps to it, and count what they do."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa

from posttrain.data.records.outcome import Outcome
from posttrain.data.records.schema import CHANGED, REJECTED, concat
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.step import Step

Transform = Callable[[pa.Table], Outcome]
"""Parts a RECORD table into what it keeps and what it rejects."""


class RecordSet:
    """One named set of records on its way through the steps. ``records`` is what is left of it."""

    def __init__(self, name: str, records: pa.Table) -> None:
        self.name = name
        self.records = records
        self.funnel: list[dict[str, Any]] = [self._entry("read", "in", records.num_rows)]
        self._rejected: list[pa.Table] = []
        self._changed: list[pa.Table] = []

    def through(self, *steps: Step, evaluation: pa.Table | None = None) -> None:
        """Keep what the steps keep; count and remember what they reject.

        Args:
            evaluation: RECORD table of what models are measured on.
        """
        for step in steps:
            self.through_work(partial(apply_step, step, evaluation=evaluation))

    def through_work(self, work: Transform) -> None:
        """Keep what ``work`` keeps; count and remember what it rejects."""
        before = self.records.num_rows
        self.records, rejected, changed, _ = work(self.records)
        self._rejected.append(rejected)
        self._changed.append(changed)
        names = zip(rejected["step"].to_pylist(), rejected["reason"].to_pylist(), strict=True)
        self.funnel += [self._entry(name, reason, count) for (name, reason), count in Counter(names).items()]
        if added := self.records.num_rows + rejected.num_rows - before:
            self.funnel.append(self._entry("augment", "added", -added))

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

    @property
    def changed(self) -> pa.Table:
        """CHANGED table of all that the steps rewrote or added, step by step."""
        return concat(self._changed, CHANGED)

    def _entry(self, step: str, reason: str, count: int) -> dict[str, Any]:
        return {"set": self.name, "step": step, "reason": reason, "count": count}
