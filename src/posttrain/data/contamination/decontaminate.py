"""Rejects training records that give away evaluation records."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from posttrain.data.contamination.evaluation_index import (
    EvaluationIndex,
    Findings,
    contaminated_counts,
    index_evaluation,
)
from posttrain.data.contamination.incremental import (
    Prefilter,
    PreviousFindings,
    contamination_sketch,
    decode_state,
    encode_state,
    rows_sharing_runs,
)
from posttrain.data.contamination.word_index import newly_common
from posttrain.data.duplicates.dense_buckets import Map
from posttrain.data.records.outcome import Rejection
from posttrain.data.steps.step import Corpus, GlobalResult, GlobalStep, ShardView

Indices = npt.NDArray[np.int64]

_INCREMENTAL_LIMIT = 4096  # new evaluation records, above which a search from scratch is as quick
_PARALLEL_INDEX_SIZE = 4096  # evaluation records, above which two processes index them sooner


class Decontaminate(GlobalStep):
    """Rejects training records that give away an evaluation record, of the test set or of any suite.

    The reasons, the first that holds: the record **equals a test input**; it has the **group of a test record**; its
    input is **like a test input**, by the Jaccard similarity of their character 5-grams; it **shares a 13-gram with a
    test record**, a run of words without case and punctuation somewhere in prompt or answers of both (Brown et al.
    2020, arXiv:2005.14165, appendix C); it holds most of a longer test input close together, which also is **like a
    test input**. Texts of fewer than 13 words are compared whole.

    All of it is exact, except that inputs are compared in stretches of at least 4,096 characters.
    """

    name: ClassVar[str] = "decontaminate"
    training_only: ClassVar[bool] = True

    ngram: int | None = Field(13, ge=1, description="words in a run that must not be shared; null: any may")
    share: float = Field(
        0.0, ge=0, le=1, description="part of either record's runs of words that must be shared; 0: one run is enough"
    )
    threshold: float | None = Field(
        0.8, gt=0, le=1, description="Jaccard similarity from which inputs are alike; null: only equal ones are found"
    )
    contained: float | None = Field(
        0.8, gt=0, le=1, description="part of a test input that a record must not hold close together; null: any"
    )
    least_words: int = Field(
        8,
        ge=1,
        description="words from which a test input is looked for inside longer records: shorter ones stand in many a "
        "text by chance, and GPT-3's shortest run had 8 words",
    )
    ignore_above: int | None = Field(
        10,
        ge=1,
        description="runs of words in more test records than this are the wording of a task and say nothing, as "
        "GPT-3 left out runs in more than 10 documents; null: all count",
    )

    def sketch_key(self) -> dict[str, Any]:
        return {"step": self.name, "version": self.version, "ngram": self.ngram, "alike": self.threshold is not None}

    def sketch(self, table: pa.Table) -> pa.Table:
        """What `posttrain.data.contamination.incremental.contamination_sketch` keeps."""
        return contamination_sketch(table, self.ngram, self.threshold is not None)

    def against(self, evaluation: pa.Table, over: Map = map) -> EvaluationIndex:
        """What looks for the records of a RECORD table with these settings; ``over`` as in `index_evaluation`."""
        return index_evaluation(evaluation, **self.model_dump(), over=over)

    def decide(self, corpus: Corpus) -> GlobalResult:
        evaluation = corpus.evaluation()
        findings = self._search(corpus, evaluation)
        return GlobalResult(
            findings.rejections,
            state=encode_state(corpus.alive, findings, evaluation),
            contaminated=contaminated_counts(evaluation, findings.pairs),
        )

    def _search(self, corpus: Corpus, evaluation: pa.Table) -> Findings:
        """Search the rows that are alive; rows of an earlier version only for new evaluation records."""
        index = self.against(evaluation, corpus.map if evaluation.num_rows > _PARALLEL_INDEX_SIZE else map)
        known = corpus.known()
        before = decode_state(known.table, evaluation) if known else None
        asked, settled, prefilter = corpus.alive, np.zeros(corpus.rows, dtype=bool), None
        if before is not None:
            fresh, unsettled = self._changed(before, evaluation)
            if fresh.sum() <= _INCREMENTAL_LIMIT:
                settled[: len(before.seen)] = before.seen
                settled[unsettled] = False
                settled &= corpus.alive
                asked, prefilter = corpus.alive & ~settled, Prefilter.of(evaluation, index, fresh)
        rejections: dict[int, Rejection] = {}
        pairs: list[tuple[int, int]] = []
        first = 0
        items = list(_items(corpus.parts(), asked, settled))
        for item, (rows, findings) in zip(
            items, corpus.map(partial(_search, index=index, prefilter=prefilter), items), strict=True
        ):
            rejections.update((first + row, rejection) for row, rejection in findings.rejections.items())
            pairs += ((first + row, other) for row, other in findings.pairs)
            settled[first + rows] = False
            first += item.part.rows
        if before is not None:
            rejections.update((row, rejection) for row, rejection in before.findings.rejections.items() if settled[row])
            pairs += (pair for pair in before.findings.pairs if settled[pair[0]])
        return Findings(rejections, pairs)

    def _changed(self, before: PreviousFindings, evaluation: pa.Table) -> tuple[npt.NDArray[np.bool_], list[int]]:
        """Return the evaluation records to search for in all rows, and the rows whose findings may no longer hold.

        Where runs of words have become the wording of too many evaluation records, the rows found by them are
        searched again; and a share of all the runs of such an evaluation record is greater than it was.
        """
        if self.ngram is None or self.ignore_above is None:
            return before.fresh, []
        changed = np.zeros(evaluation.num_rows, dtype=bool)
        changed[newly_common(evaluation, ~before.fresh, self.ngram, self.ignore_above)] = True
        fresh = before.fresh | changed if self.share else before.fresh
        return fresh, [row for row, other in before.findings.pairs if changed[other]]


class _Item(NamedTuple):
    """A work item for one process.

    Attributes:
        asked: bool, the rows to search.
        settled: bool, the rows to search only if the prefilter finds new evaluation records likely in them.
    """

    part: ShardView
    asked: npt.NDArray[np.bool_]
    settled: npt.NDArray[np.bool_]


def _items(parts: Iterable[ShardView], asked: npt.NDArray[np.bool_], settled: npt.NDArray[np.bool_]) -> Iterator[_Item]:
    first = 0
    for part in parts:
        rows = slice(first, first + part.rows)
        yield _Item(part, asked[rows], settled[rows])
        first += part.rows


def _search(item: _Item, index: EvaluationIndex, prefilter: Prefilter | None) -> tuple[Indices, Findings]:
    """Search some rows, and return them with the findings."""
    if not (item.asked | item.settled).any():
        return np.empty(0, np.int64), Findings({}, [])
    sketches = item.part.sketches()
    asked = item.asked
    if prefilter is not None and item.settled.any():
        asked = asked | item.settled & prefilter.likely(sketches)
    rows = np.flatnonzero(asked)
    if not len(rows):
        return rows, Findings({}, [])
    shares = (
        rows_sharing_runs(sketches.select(["runs"]).take(pa.array(rows)), index.word_index.marks)
        if index.word_index
        else None
    )
    findings = index.search(item.part.take(rows), shares)
    return rows, Findings(
        {int(rows[row]): rejection for row, rejection in findings.rejections.items()},
        [(int(rows[row]), other) for row, other in findings.pairs],
    )
