"""Abuse in records, by listed words and by a classifier."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from posttrain.data.records.normalise import Field as Words
from posttrain.data.records.normalise import texts_of
from posttrain.data.safety.terms import Terms, hits, read_terms
from posttrain.data.steps.bounds import Bound, judge
from posttrain.data.steps.sources import check_there, known, state, under
from posttrain.data.steps.step import Outcome, RowStep
from posttrain.store.errors import UserError

if TYPE_CHECKING:
    from posttrain.data.quality.classifier import LinearClassifier
    from posttrain.models.sequence_classifier import SequenceClassifier


class Toxicity(RowStep):
    """Records in which listed words are frequent go, and those that a classifier calls toxic.

    That a page with a listed word goes is C4's rule (Raffel et al. 2020, arXiv:1910.10683), which is ``max_hits: 0``
    here; it also takes out what speaks about abuse (Dodge et al. 2021, arXiv:2104.08758), so the default is a share.
    The list that comes with the program is short, and English.

    Facts: ``toxic_words``, listed words for each 100 words; ``toxicity``, the classifier's probability, or without
    one the same as ``toxic_words``.
    """

    name: ClassVar[str] = "toxicity"

    action: Literal["reject", "report"] = Field("reject", description="reject the records, or only report them")
    field: Words = Field("all", description="which words of a record are read: input, answer or all")
    words: str | None = Field(None, description="file of terms, one a line; null: the short list of the program")
    disguised: bool = Field(False, description="whether words such as f*ck and sh1t count")
    max_hits: float | None = Field(
        1.0, ge=0, description="most listed words for each 100 words; 0: any rejects; null: they do not matter"
    )
    classifier: str | None = Field(
        None, description="folder of a transformers sequence classifier, or of one that `quality` has trained"
    )
    toxic_labels: list[str] = Field([], description="labels of the classifier that count as toxic")
    classifier_threshold: float = Field(0.5, ge=0, le=1, description="probability from which a record goes")

    def located(self, root: Path) -> Self:
        return self.model_copy(
            update={
                "words": self.words and under(root, self.words),
                "classifier": self.classifier and under(root, self.classifier),
            }
        )

    def check(self) -> None:
        self._terms()
        if self.classifier is not None:
            check_there(self.classifier, "toxicity.classifier")
            self._probabilities([])

    def key(self) -> dict[str, Any]:
        files = {name: known(file) for name in ("words", "classifier") if (file := getattr(self, name)) is not None}
        return {**super().key(), **files}

    def apply(self, table: pa.Table) -> Outcome:
        texts = texts_of(table, self.field)
        counts = hits(texts, self._terms(), disguised=self.disguised).astype(np.float64)
        frequent = 100 * counts[:, 0] / np.maximum(counts[:, 1], 1)
        measures = {"toxic_words": frequent, "toxicity": frequent}
        bounds = [Bound("listed words", "toxic_words", "at most", self.max_hits)]
        if self.classifier is not None:
            measures["toxicity"] = self._probabilities(texts)
            bounds.append(Bound("toxic", "toxicity", "less than", self.classifier_threshold))
        return judge(table, self.name, measures, bounds if self.action == "reject" else [])

    def _terms(self) -> Terms:
        return _terms(self.words, "" if self.words is None else state(self.words))

    def _probabilities(self, texts: list[str]) -> npt.NDArray[np.float64]:
        """Of being toxic, float64 [N]."""
        from posttrain.data.quality.classifier import is_classifier

        folder = str(self.classifier)
        if is_classifier(Path(folder)):
            return 1 - _quality(folder, state(folder)).probabilities(texts)
        where = "toxicity.toxic_labels"
        if not self.toxic_labels:
            raise UserError("no label is said to be toxic", where=where, fix="name some of the classifier's")
        classifier = _classifier(folder, state(folder))
        return classifier.probabilities(texts, classifier.places(self.toxic_labels, where))


@cache
def _terms(file: str | None, state: str) -> Terms:
    return read_terms(None if file is None else Path(file))


@cache
def _classifier(folder: str, state: str) -> "SequenceClassifier":
    from posttrain.models.sequence_classifier import SequenceClassifier

    return SequenceClassifier.load(Path(folder))


@cache
def _quality(folder: str, state: str) -> "LinearClassifier":
    from posttrain.data.quality.classifier import load_classifier

    return load_classifier(Path(folder))
