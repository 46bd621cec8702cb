"""Filters abusive records by a list of terms and by a classifier."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from posttrain.data.records.outcome import Outcome
from posttrain.data.records.record import TextField, joined_texts, plain_words
from posttrain.data.steps.bounds import Bound, apply_bounds
from posttrain.data.steps.resources import check_exists, file_key, file_state, load_linear_classifier, resolve_path
from posttrain.data.steps.step import RowStep
from posttrain.store.errors import UserError
from posttrain.store.text_files import read_text

if TYPE_CHECKING:
    from posttrain.models.classifier import SequenceClassifier


@dataclass(frozen=True)
class TermList:
    """Listed terms, each as its words in lower case.

    Attributes:
        by_first: Terms by their first word, as tuples of words.
    """

    by_first: dict[str, tuple[tuple[str, ...], ...]]

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> "TermList":
        """Parses lines of terms, and skips empty lines and those that begin with ``#``."""
        terms = {tuple(term.split()) for term in plain_words(line for line in lines if not line.startswith("#"))}
        by_first: dict[str, tuple[tuple[str, ...], ...]] = {}
        for term in sorted(terms - {()}):
            by_first[term[0]] = (*by_first.get(term[0], ()), term)
        return cls(by_first)


class Toxicity(RowStep):
    """Rejects records with frequent listed words, and those that a classifier calls toxic.

    C4 rejects every page with a listed word (Raffel et al. 2020, arXiv:1910.10683), which is ``max_hits: 0`` here. That
    also removes texts about abuse (Dodge et al. 2021, arXiv:2104.08758), so the default is a share. The list that
    comes with the program is short, and English.

    Facts: ``toxic_words``, listed words for each 100 words; ``toxicity``, the classifier's probability, or without
    one the same as ``toxic_words``.
    """

    name: ClassVar[str] = "toxicity"

    action: Literal["reject", "report"] = Field("reject", description="Reject the records, or only report them.")
    field: TextField = Field("all", description="Text of a record to read: the input, the answer, or all.")
    words: str | None = Field(None, description="File of terms, one per line; null: the short list of the program.")
    max_hits: float | None = Field(
        1.0, ge=0, description="Most listed words for each 100 words; 0: any rejects; null: no bound."
    )
    classifier: str | None = Field(
        None, description="Folder of a transformers sequence classifier, or of one that `quality` has trained."
    )
    toxic_labels: list[str] = Field([], description="Labels of the classifier that count as toxic.")
    classifier_threshold: float = Field(0.5, ge=0, le=1, description="Probability from which a record is rejected.")

    def located(self, root: Path) -> Self:
        return self.model_copy(
            update={
                "words": self.words and resolve_path(root, self.words),
                "classifier": self.classifier and resolve_path(root, self.classifier),
            }
        )

    def check(self) -> None:
        self._terms()
        if self.classifier is not None:
            check_exists(self.classifier, "toxicity.classifier")
            self._probabilities([])

    def key(self) -> dict[str, Any]:
        files = {name: file_key(file) for name in ("words", "classifier") if (file := getattr(self, name)) is not None}
        return {**super().key(), **files}

    def apply(self, table: pa.Table) -> Outcome:
        texts = joined_texts(table, self.field)
        counts = count_terms(texts, self._terms()).astype(np.float64)
        # A record without words has no listed one either: 0, and not 0 / 0.
        frequent = 100 * counts[:, 0] / np.maximum(counts[:, 1], 1)
        measures = {"toxic_words": frequent, "toxicity": frequent}
        bounds = [Bound("listed words", "toxic_words", "at most", self.max_hits)]
        if self.classifier is not None:
            measures["toxicity"] = self._probabilities(texts)
            bounds.append(Bound("toxic", "toxicity", "less than", self.classifier_threshold))
        return apply_bounds(table, self.name, measures, bounds if self.action == "reject" else [])

    def _terms(self) -> TermList:
        return _cached_terms(self.words, "" if self.words is None else file_state(self.words))

    def _probabilities(self, texts: list[str]) -> npt.NDArray[np.float64]:
        """Returns the probability of being toxic, float64 [N]."""
        from posttrain.data.quality.classifier import is_classifier

        folder = str(self.classifier)
        if is_classifier(Path(folder)):
            return 1 - load_linear_classifier(folder).probabilities(texts)
        where = "toxicity.toxic_labels"
        if not self.toxic_labels:
            raise UserError("no toxic label is set", where=where, fix="name labels of the classifier")
        classifier = _sequence_classifier(folder, file_state(folder))
        return classifier.probabilities(texts, classifier.label_indices(self.toxic_labels, where))


# `state` is part of the cache's key only, so that an edited list is read again.
@cache
def _cached_terms(file: str | None, state: str) -> TermList:
    return read_terms(None if file is None else Path(file))


@cache
def _sequence_classifier(folder: str, state: str) -> "SequenceClassifier":
    from posttrain.models.classifier import SequenceClassifier

    return SequenceClassifier.load(Path(folder))


def read_terms(path: Path | None) -> TermList:
    """Reads the terms of a file, one per line, or the list that comes with the program.

    Raises:
        UserError: the file is missing, is not UTF-8, or lists nothing.
    """
    if path is None:
        return TermList.from_lines(files(__package__).joinpath("terms.txt").read_text(encoding="utf-8").splitlines())
    terms = TermList.from_lines(read_text(path, str(path)).splitlines())
    if not terms.by_first:
        raise UserError("lists no term", where=str(path), fix="put one on a line")
    return terms


def count_terms(texts: Sequence[str], terms: TermList) -> npt.NDArray[np.int64]:
    """Counts the listed terms and the words of each text, int64 [N, 2].

    Words are runs of letters and digits, whatever their case; a Chinese or Japanese character is a word. Terms that
    overlap all count.

    """
    counts = np.zeros((len(texts), 2), np.int64)
    for row, plain in enumerate(plain_words(texts)):
        words = plain.split()
        counts[row, 1] = len(words)
        if not terms.by_first.keys().isdisjoint(words):
            counts[row, 0] = _count_listed(words, terms)
    return counts


def _count_listed(words: Sequence[str], terms: TermList) -> int:
    return sum(
        tuple(words[index : index + len(term)]) == term
        for index, word in enumerate(words)
        for term in terms.by_first.get(word, ())
    )
