"""Profiles a dataset version: its records, its rejections, and their reasons."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import tee
from typing import Any

import pyarrow as pa

from posttrain.data.report.counts import (
    ALL,
    FactCounts,
    Hits,
    LabelBalance,
    RecordCounts,
    Sampled,
    Tokenizer,
    descending,
)
from posttrain.data.report.distribution import Distribution
from posttrain.data.report.ngrams import ngram_counts
from posttrain.data.report.rejections import DuplicateClusters, RejectionCounts, RejectionSummary
from posttrain.data.report.sample import BottomKSample
from posttrain.data.versions.version import Version

SAMPLE = 20_000

_NGRAMS, _LONGEST = 50, 3

_LISTED = 1000

_SET = "records"


@dataclass(frozen=True)
class Profile:
    """Holds all figures of a dataset version's report.

    Attributes:
        records: their number.
        answered: number of records with an answer.
        open_ended: whether answers are texts rather than labels.
        funnel: ``{set, step, reason, count}`` as the pipeline counted: from ``read, in`` to ``kept, kept`` in each set.
        sources, splits, kinds: records by source, by split and by kind (`RECORD_KINDS`).
        balances: of the labels; ``all`` and by split.
        lengths: by part and unit, such as ``input characters``; ``totals`` are their sums.
        languages: records by language, if a step measured it.
        scores: every fact that is a number, but for those of the step ``length``, which are measured here.
        categories: every fact in words, counted.
        pii: finds of personal data by kind.
        clusters: of duplicates, by step.
        rejected: by step and reason, with examples.
        ngrams: by part, the most common runs of 1 to 3 words in the sample.
        sample: records chosen by the hash of their ids, for what cannot be counted in bounded memory; not in the JSON.
    """

    records: int
    answered: int = 0
    open_ended: bool = False
    funnel: tuple[Mapping[str, Any], ...] = ()
    sources: Mapping[str, int] = field(default_factory=dict)
    splits: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, int] = field(default_factory=dict)
    balances: Mapping[str, LabelBalance] = field(default_factory=dict)
    lengths: Mapping[str, Distribution] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    languages: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, Distribution] = field(default_factory=dict)
    categories: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    pii: Mapping[str, Hits] = field(default_factory=dict)
    clusters: Mapping[str, DuplicateClusters] = field(default_factory=dict)
    rejected: tuple[RejectionSummary, ...] = ()
    ngrams: Mapping[str, tuple[tuple[tuple[str, int], ...], ...]] = field(default_factory=dict)
    sample: tuple[Sampled, ...] = ()

    @property
    def labels(self) -> Mapping[str, int]:
        """Counts records by label; empty if answers are not labels."""
        return self.balances[ALL].counts if ALL in self.balances else {}

    def to_json(self) -> dict[str, Any]:
        """Converts the report to JSON values. Lists the 1000 most common sources and text facts."""
        return {
            "records": self.records,
            "answered": self.answered,
            "open_ended": self.open_ended,
            "funnel": [dict(row) for row in self.funnel],
            "sources": _most_common(self.sources),
            "splits": dict(self.splits),
            "kinds": dict(self.kinds),
            "labels": {side: measure.to_json() for side, measure in self.balances.items()},
            "lengths": {
                name: {"total": self.totals[name]} | measure.to_json() for name, measure in self.lengths.items()
            },
            "languages": dict(self.languages),
            "scores": {name: measure.to_json() for name, measure in self.scores.items()},
            "categories": {name: _most_common(counts) for name, counts in self.categories.items()},
            "pii": {kind: measure._asdict() for kind, measure in self.pii.items()},
            "duplicates": {step: measure.to_json() for step, measure in self.clusters.items()},
            "rejected": [measure.to_json() for measure in self.rejected],
            "ngrams": {
                "sampled_records": len(self.sample),
                "most_common": {
                    part: {str(n): dict(runs) for n, runs in enumerate(lists, 1)} for part, lists in self.ngrams.items()
                },
            },
        }


def build_profile(
    records: Iterable[pa.Table],
    splits: str | Iterable[Sequence[str | None]] | None = None,
    rejected: Iterable[pa.Table] = (),
    funnel: Sequence[Mapping[str, Any]] = (),
    facts: Iterable[pa.Table] = (),
    tokenizer: Tokenizer | None = None,
    *,
    sample: int = SAMPLE,
    seed: int = 0,
) -> Profile:
    """Reads a version once, in memory that does not grow with it but for eight bytes a rejected duplicate.

    The numbers and examples are the same in whatever order records come and however tables are cut.

    Args:
        records: RECORD tables of what was kept.
        splits: the split of every row, a list for each table, or the name of a column that says it.
        rejected: REJECTED tables.
        funnel: the pipeline's counts, ``set`` left out where there is one; where there are none they are made of what
            was kept and what was rejected.
        facts: FACT tables; what was measured of records that were rejected later counts too.
        tokenizer: for lengths in tokens.
        sample: how many records n-grams are counted in, and drift is looked for in.
        seed: of the hash that chooses the sample and the examples.

    Raises:
        ValueError: ``splits`` does not fit the records.
    """
    counts = RecordCounts(tokenizer, BottomKSample(sample), seed)
    for table, sides in _with_splits(records, splits):
        counts.add(table, sides)
    turned_away = RejectionCounts(seed)
    for table in rejected:
        turned_away.add(table)
    measured = FactCounts()
    for table in facts:
        measured.add(table)
    rows = counts.sample.rows()
    # N-grams are counted in a sample: their number grows with the texts and would not fit into bounded memory.
    parts = {"input": [row.input for row in rows]}
    if counts.open_ended and counts.answered:
        parts["answer"] = [row.answer for row in rows]
    return Profile(
        records=counts.records,
        answered=counts.answered,
        open_ended=bool(counts.answered) and counts.open_ended,
        funnel=tuple({"set": _SET, **row} for row in funnel) or _funnel(counts.records, turned_away),
        sources=descending(counts.sources),
        splits=descending(counts.splits),
        kinds=descending(counts.kinds),
        balances=counts.balances(),
        lengths=counts.lengths,
        totals=counts.totals,
        languages=descending(measured.languages),
        # The step `length` measures what the report measures itself.
        scores={name: measure for name, measure in measured.scores.items() if not name.startswith("length: ")},
        categories=measured.categories,
        pii=measured.pii,
        clusters=turned_away.clusters,
        rejected=turned_away.reasons,
        ngrams={
            part: tuple(tuple(measure.most_common(_NGRAMS)) for measure in ngram_counts([texts], _LONGEST))
            for part, texts in parts.items()
        },
        sample=tuple(rows),
    )


def _with_splits(
    records: Iterable[pa.Table], splits: str | Iterable[Sequence[str | None]] | None
) -> Iterator[tuple[pa.Table, Sequence[str | None] | None]]:
    if splits is None:
        return ((table, None) for table in records)
    if isinstance(splits, str):
        return ((table, table[splits].to_pylist()) for table in records)
    return zip(records, splits, strict=True)


def _funnel(records: int, rejected: RejectionCounts) -> tuple[Mapping[str, Any], ...]:
    rows = [("read", "in", records + rejected.total)]
    rows += [(rejection.step, rejection.reason, rejection.count) for rejection in rejected.reasons]
    rows.append(("kept", "kept", records))
    return tuple({"set": _SET, "step": step, "reason": reason, "count": count} for step, reason, count in rows)


def _most_common(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(list(counts.items())[:_LISTED])


def profile_version(version: Version, tokenizer: Tokenizer | None = None) -> Profile:
    """Profiles a stored version piece by piece: its records, rejections and measured facts."""
    tables, sides = tee(version.tables_with_splits())  # both are read in turn, so at most one table waits
    return build_profile(
        (table for table, _ in tables),
        (names for _, names in sides),
        rejected=version.rejected(),
        funnel=version.meta["funnel"],
        facts=version.facts(),
        tokenizer=tokenizer,
    )
