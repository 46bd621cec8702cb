"""What is counted of rejected records, and which of them are shown."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from posttrain.data.pii.detect import mask
from posttrain.data.quality_report.clusters import ClusterCollector, Clusters
from posttrain.data.quality_report.columns import input_column
from posttrain.data.quality_report.sample import Smallest, hashes

_EXAMPLES, _CHARACTERS = 5, 300


@dataclass(frozen=True)
class Example:
    """A rejected record: where it stood, the beginning of its texts with personal data masked, and why it went."""

    id: str
    place: str
    text: str
    answer: str
    detail: str
    score: float | None
    kept: str | None


@dataclass(frozen=True)
class Rejected:
    """The records that one step rejected for one reason, and at most five of them, chosen by the hash of their ids."""

    step: str
    reason: str
    count: int
    examples: tuple[Example, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"examples": [asdict(one) for one in self.examples]}


@dataclass
class RejectionCounts:
    """Everything that one pass over REJECTED tables counts, by step in the order in which they come."""

    seed: int
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _examples: dict[tuple[str, str], Smallest[Example]] = field(default_factory=dict)
    _clusters: dict[str, ClusterCollector] = field(default_factory=dict)

    def add(self, table: pa.Table) -> None:
        """Count the rows of a REJECTED table."""
        for group in table.group_by(["step", "reason"], use_threads=False).aggregate([]).to_pylist():
            step, reason = group["step"], group["reason"]
            rows = table.filter(pc.and_(pc.equal(table["step"], step), pc.equal(table["reason"], reason)))
            texts = input_column(rows)
            self._counts[step, reason] += rows.num_rows
            self._add_examples(rows, texts, self._examples.setdefault((step, reason), Smallest(_EXAMPLES)))
            duplicate = rows["cluster"].combine_chunks().is_valid()
            if pc.any(duplicate).as_py():
                collector = self._clusters.setdefault(step, ClusterCollector(self.seed))
                collector.add(rows.filter(duplicate), texts.filter(duplicate), _CHARACTERS)

    @property
    def total(self) -> int:
        return self._counts.total()

    @property
    def reasons(self) -> tuple[Rejected, ...]:
        return tuple(
            Rejected(step, reason, count, tuple(map(_masked, self._examples[step, reason].rows())))
            for (step, reason), count in self._counts.items()
        )

    @property
    def clusters(self) -> dict[str, Clusters]:
        """By step."""
        return {step: collector.clusters() for step, collector in self._clusters.items()}

    def _add_examples(self, rows: pa.Table, texts: pa.Array, sample: Smallest[Example]) -> None:
        ids = rows["id"].to_pylist()
        order = hashes(ids, self.seed)
        for row in sample.wanted(order).tolist():
            one = {name: rows[name][row].as_py() for name in rows.schema.names if name != "prompt"}
            place = f"{one['source']}:{one['line']}" if one["line"] is not None else str(one["source"])
            text, answer = (_beginning(words) for words in (texts[row].as_py(), one["completion"]))
            score = one["score"] if one["score"] is not None and math.isfinite(one["score"]) else None
            example = Example(ids[row], place, text, answer, _beginning(one["detail"]), score, one["kept"])
            sample.add(int(order[row]), ids[row], example)


def _masked(example: Example) -> Example:
    """As it may be shown: reports are mailed, and a record may have been rejected for its personal data."""
    text, answer, detail = (mask(words)[0] for words in (example.text, example.answer, example.detail))
    return replace(example, text=text, answer=answer, detail=detail)


def _beginning(text: str | None) -> str:
    text = text or ""
    return text if len(text) <= _CHARACTERS else text[:_CHARACTERS] + "…"
