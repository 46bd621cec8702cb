"""Training records that give away what models are measured on."""

from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from posttrain.data.contamination import Findings, Index, against
from posttrain.data.steps.step import Corpus, Decision, GlobalStep, Rejection


class Decontaminate(GlobalStep):
    """Training records go that give away an evaluation record, of the test set or of any suite.

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
    ignore_above: int | None = Field(
        10,
        ge=1,
        description="runs of words in more test records than this are the wording of a task and say nothing, as "
        "GPT-3 left out runs in more than 10 documents; null: all count",
    )

    def sketch_key(self) -> dict[str, Any]:
        return {"step": self.name}  # ids, whatever the settings

    def against(self, evaluation: pa.Table) -> Index:
        """What looks for the records of a RECORD table with these settings."""
        return against(evaluation, **self.model_dump())

    def search(self, corpus: Corpus) -> Findings:
        """What the living rows give away; `posttrain.data.contamination.share_found` says which suites it leaves."""
        rejections: dict[int, Rejection] = {}
        pairs: list[tuple[int, int]] = []
        alive = corpus.alive
        for first, found in corpus.map_tables(partial(_search, index=self.against(corpus.evaluation()))):
            rejections.update((first + row, one) for row, one in found.rejections.items() if alive[first + row])
            pairs += ((first + row, other) for row, other in found.pairs if alive[first + row])
        return Findings(rejections, pairs)

    def decide(self, corpus: Corpus) -> Decision:
        return Decision(self.search(corpus).rejections)


def _search(table: pa.Table, index: Index) -> Findings:
    return index.search(table)
