"""Rejects training records that overlap with evaluation records."""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field

from posttrain.data.arrays import Mask
from posttrain.data.records.outcome import Rejection
from posttrain.data.similarity.evaluation_index import EvaluationIndex, Matches, contaminated_counts
from posttrain.data.similarity.overlap_sketch import overlap_sketch
from posttrain.data.steps.step import Corpus, GlobalResult, GlobalStep, ShardView


class Decontaminate(GlobalStep):
    """Rejects training records that overlap with an evaluation record, of the test set or of any suite.

    The reasons, the first that holds: the record **equals a test input**; it has the **group of a test record**; its
    input is **like a test input**, by the Jaccard similarity of their character 5-grams or, below 13 words, by equal
    words; it **shares a 13-gram with a test record**, a run of words without case and punctuation somewhere in prompt
    or answers of both (Brown et al. 2020, arXiv:2005.14165, appendix C); it **holds a test input** of 8 to 12 words.
    Runs of words in more than 10 test records are the wording of the task, and do not count.

    All of it is exact, except that MinHash misses about one in 100,000 inputs just at the threshold; the check before
    training misses none.
    """

    name: ClassVar[str] = "decontaminate"
    version: ClassVar[int] = 2
    training_only: ClassVar[bool] = True
    removes_leaks: ClassVar[bool] = True
    every_round: ClassVar[bool] = True

    ngram: int | None = Field(13, ge=1, description="Words in a run that must not be shared; null: any may.")
    threshold: float | None = Field(
        0.8, gt=0, le=1, description="Jaccard similarity from which inputs are similar; null: only equal ones count."
    )

    def sketch_key(self) -> dict[str, Any]:
        return {"step": self.name, "version": self.version, "threshold": self.threshold, "ngram": self.ngram}

    def sketch(self, table: pa.Table) -> pa.Table:
        return overlap_sketch(table, self.threshold, self.ngram)

    def decide(self, corpus: Corpus) -> GlobalResult:
        evaluation = corpus.evaluation
        if not evaluation.num_rows:
            return GlobalResult()
        index = EvaluationIndex.from_records(evaluation, self.threshold, self.ngram)
        views = corpus.shard_views()
        starts = np.cumsum([0, *(view.rows for view in views)])
        items = [_Item(view, part) for view, part in zip(views, np.split(corpus.alive, starts[1:-1]), strict=True)]
        rejections: dict[int, Rejection] = {}
        pairs: set[tuple[int, int]] = set()
        for start, matches in zip(starts.tolist(), corpus.map(partial(_search, index=index), items), strict=False):
            for row, (other, reason, detail, score) in sorted(matches.best.items()):
                detail = f"{detail} {index.where[other]}"
                rejections[start + row] = Rejection(reason, detail, score, kept=index.ids[other])
            pairs |= {(start + row, other) for row, other in matches.pairs}
        return GlobalResult(rejections, contaminated=contaminated_counts(evaluation, pairs))


class _Item(NamedTuple):
    """A work item of a process: the rows of a shard that no step has rejected."""

    view: ShardView
    alive: Mask


def _search(item: _Item, index: EvaluationIndex) -> Matches:
    return index.search(item.view.sketches(), item.view.take, np.flatnonzero(item.alive))
