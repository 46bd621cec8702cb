"""Counts rejected records and clusters of duplicates, and samples examples."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.data.pii.detect import mask
from posttrain.data.report.counts import input_column
from posttrain.data.report.sample import BottomKSample, id_hashes

_EXAMPLES, _CHARACTERS = 5, 300

_LARGEST, _SHOWN_TEXTS, _SAMPLED = 5, 3, 20_000

Member = tuple[int, str, str]
"""Hash of the cluster, its name, and a text."""


@dataclass(frozen=True)
class Example:
    """Shows a rejected record: its source, the beginning of its texts with personal data masked, and the reason."""

    id: str
    place: str
    text: str
    answer: str
    detail: str
    score: float | None
    kept: str | None


@dataclass(frozen=True)
class RejectionSummary:
    """Counts the records that one step rejected for one reason, with up to five examples chosen by hash of id."""

    step: str
    reason: str
    count: int
    examples: tuple[Example, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"examples": [asdict(example) for example in self.examples]}


@dataclass(frozen=True)
class DuplicateCluster:
    """Shows a cluster of ``size`` records, of which one was kept, and texts of rejected ones, personal data masked."""

    name: str
    size: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class DuplicateClusters:
    """Counts the clusters that one step found by size; sizes include the kept record."""

    sizes: dict[int, int]
    largest: tuple[DuplicateCluster, ...]

    @property
    def number(self) -> int:
        return sum(self.sizes.values())

    @property
    def removed(self) -> int:
        return sum((size - 1) * number for size, number in self.sizes.items())

    def to_json(self) -> dict[str, Any]:
        largest = [
            {"name": cluster.name, "size": cluster.size, "texts": list(cluster.texts)} for cluster in self.largest
        ]
        sizes = {str(size): number for size, number in sorted(self.sizes.items())}
        return {"number": self.number, "removed": self.removed, "sizes": sizes, "largest": largest}


@dataclass
class ClusterCollector:
    """Collects the rejected records of one step: eight bytes each, and a sample of their texts."""

    seed: int
    _members: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _sample: BottomKSample[Member] = field(default_factory=lambda: BottomKSample(_SAMPLED))

    def add(self, rejected: pa.Table, texts: pa.Array, shown: int) -> None:
        """Counts the rows of a REJECTED table whose cluster is not null; of ``texts`` [N] ``shown`` characters."""
        names = rejected["cluster"].to_pylist()
        ids = rejected["id"].to_pylist()
        # Eight bytes each instead of a name: millions of duplicates may be rejected.
        clusters = id_hashes(names, self.seed)
        self._members.append(clusters)
        order = id_hashes(ids, self.seed)
        for row in self._sample.wanted(order).tolist():
            text = (texts[row].as_py() or "")[:shown]
            self._sample.add(int(order[row]), ids[row], (int(clusters[row]), names[row], text))

    def clusters(self) -> DuplicateClusters:
        """Summarises the clusters; large ones surely have members in the sample, and ties go to smaller hashes."""
        cluster_hashes, removed = np.unique(
            np.concatenate([np.zeros(0, np.uint64), *self._members]), return_counts=True
        )
        texts: dict[int, list[tuple[str, str]]] = {}
        for cluster, name, text in self._sample.rows():
            texts.setdefault(cluster, []).append((name, text))
        sampled = np.isin(cluster_hashes, np.array(list(texts), dtype=np.uint64))
        order = np.lexsort((cluster_hashes, -removed))
        largest = []
        for index in order[sampled[order]][:_LARGEST].tolist():
            members = texts[int(cluster_hashes[index])]
            # Equal texts once: members of a cluster are often copies.
            examples = tuple(mask(text)[0] for text in list(dict.fromkeys(text for _, text in members))[:_SHOWN_TEXTS])
            largest.append(DuplicateCluster(members[0][0], int(removed[index]) + 1, examples))
        return DuplicateClusters(dict(Counter((removed + 1).tolist())), tuple(largest))


@dataclass
class RejectionCounts:
    """Counts everything that one pass over REJECTED tables gives, by step in order of appearance."""

    seed: int
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _examples: dict[tuple[str, str], BottomKSample[Example]] = field(default_factory=dict)
    _clusters: dict[str, ClusterCollector] = field(default_factory=dict)

    def add(self, table: pa.Table) -> None:
        """Counts the rows of a REJECTED table."""
        for group in table.group_by(["step", "reason"], use_threads=False).aggregate([]).to_pylist():
            step, reason = group["step"], group["reason"]
            rows = table.filter(pc.and_(pc.equal(table["step"], step), pc.equal(table["reason"], reason)))
            texts = input_column(rows)
            self._counts[step, reason] += rows.num_rows
            self._add_examples(rows, texts, self._examples.setdefault((step, reason), BottomKSample(_EXAMPLES)))
            duplicate = rows["cluster"].combine_chunks().is_valid()
            if pc.any(duplicate).as_py():
                collector = self._clusters.setdefault(step, ClusterCollector(self.seed))
                collector.add(rows.filter(duplicate), texts.filter(duplicate), _CHARACTERS)

    @property
    def total(self) -> int:
        return self._counts.total()

    @property
    def reasons(self) -> tuple[RejectionSummary, ...]:
        return tuple(
            RejectionSummary(step, reason, count, tuple(map(_mask_example, self._examples[step, reason].rows())))
            for (step, reason), count in self._counts.items()
        )

    @property
    def clusters(self) -> dict[str, DuplicateClusters]:
        """By step."""
        return {step: collector.clusters() for step, collector in self._clusters.items()}

    def _add_examples(self, rows: pa.Table, texts: pa.Array, sample: BottomKSample[Example]) -> None:
        ids = rows["id"].to_pylist()
        # Choosing by hash of the id gives the same examples however tables are cut.
        order = id_hashes(ids, self.seed)
        for row in sample.wanted(order).tolist():
            row_values = {name: rows[name][row].as_py() for name in rows.schema.names if name != "prompt"}
            location = (
                f"{row_values['source']}:{row_values['line']}"
                if row_values["line"] is not None
                else str(row_values["source"])
            )
            text, answer = (_truncate(field_text) for field_text in (texts[row].as_py(), row_values["completion"]))
            # JSON has no NaN and no infinity.
            score = (
                row_values["score"] if row_values["score"] is not None and math.isfinite(row_values["score"]) else None
            )
            example = Example(
                ids[row], location, text, answer, _truncate(row_values["detail"]), score, row_values["kept"]
            )
            sample.add(int(order[row]), ids[row], example)


def _mask_example(example: Example) -> Example:
    """Masks personal data: reports are mailed, and a record may have been rejected for its personal data."""
    text, answer, detail = (mask(field_text)[0] for field_text in (example.text, example.answer, example.detail))
    return replace(example, text=text, answer=answer, detail=detail)


def _truncate(text: str | None) -> str:
    text = text or ""
    return text if len(text) <= _CHARACTERS else text[:_CHARACTERS] + "…"
