"""What is counted of the facts that steps measured."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.data.quality_report.distribution import Collector, Distribution

ANY = "any kind"

_LANGUAGES = ("language", "lang")
_MOST_WORDS = 1000


class Hits(NamedTuple):
    """Finds of one kind: how many, and in how many records."""

    hits: int
    records: int


@dataclass
class FactCounts:
    """Numbers become distributions; words are counted, and given up where more than 1000 different ones come.

    A fact is called by its name, behind its step's where it does not begin with that. The language is the words of a
    fact with the name ``language`` or ``lang``. Facts of steps whose name begins with ``pii`` count finds: a number is
    how many of the kind in its name (``pii_email``; ``pii`` is all kinds), words are kinds with commas between.
    """

    languages: Counter[str] = field(default_factory=Counter)
    _numbers: dict[str, Collector] = field(default_factory=dict)
    _words: dict[str, Counter[str] | None] = field(default_factory=dict)
    _hits: Counter[str] = field(default_factory=Counter)
    _records: Counter[str] = field(default_factory=Counter)

    def add(self, table: pa.Table) -> None:
        """Count the rows of a FACT table."""
        for group in table.group_by(["step", "name"], use_threads=False).aggregate([]).to_pylist():
            step, name = group["step"], group["name"]
            chosen = pc.and_(pc.equal(table["step"], step), pc.equal(table["name"], name))
            rows = table.filter(chosen)
            numbers = rows["value"].drop_null().to_numpy()
            words = rows["text"].drop_null()
            if step.startswith("pii"):
                self._add_hits(ANY if name == "pii" else name.removeprefix("pii_"), numbers, words)
                continue
            called = name if name.startswith(step) else f"{step}: {name}"
            if len(numbers):
                self._numbers.setdefault(called, Collector()).add(numbers)
            if len(words):
                self._add_words(name, called, words)

    @property
    def scores(self) -> dict[str, Distribution]:
        return {name: collector.distribution() for name, collector in self._numbers.items()}

    @property
    def categories(self) -> dict[str, dict[str, int]]:
        """Counts of each fact in words, most common first; a fact with too many different ones has none."""
        return {name: descending(counts or Counter()) for name, counts in self._words.items()}

    @property
    def pii(self) -> dict[str, Hits]:
        return {kind: Hits(hits, self._records[kind]) for kind, hits in descending(self._hits).items()}

    def _add_hits(self, kind: str, numbers: npt.NDArray[np.float64], words: pa.ChunkedArray) -> None:
        found = numbers[np.isfinite(numbers)]
        if hits := int(found.sum()):
            self._hits[kind] += hits
            self._records[kind] += int((found > 0).sum())
        for text in words.to_pylist():
            kinds = Counter(word.strip() for word in text.split(",") if word.strip())
            self._hits.update(kinds)
            self._records.update(kinds.keys())

    def _add_words(self, name: str, called: str, words: pa.ChunkedArray) -> None:
        found = {row["values"]: row["counts"] for row in pc.value_counts(words).to_pylist()}
        if name in _LANGUAGES:
            self.languages.update(found)
            return
        counts = self._words.setdefault(called, Counter())
        if counts is not None:
            counts.update(found)
            if len(counts) > _MOST_WORDS:
                self._words[called] = None


def descending(counts: Counter[str]) -> dict[str, int]:
    """Most common first, equal ones by name."""
    return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))
