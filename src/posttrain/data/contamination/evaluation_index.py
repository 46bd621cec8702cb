"""Indexes the evaluation records, and finds the training records that overlap with them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.contamination.input_index import InputIndex, SimilarInputs
from posttrain.data.contamination.postings import Postings
from posttrain.data.contamination.sketches import BloomFilters
from posttrain.data.contamination.word_index import Overlap, WordIndex
from posttrain.data.duplicates.all_pairs import Map
from posttrain.data.duplicates.shingles import Shingles, owning_set
from posttrain.data.records.outcome import Rejection
from posttrain.data.records.record import input_texts, joined_texts, locations

_ROWS_A_BLOCK = 256  # so that what is made of them fits a processor's cache


class Findings(NamedTuple):
    """Holds the result of a search in a table of training records.

    Attributes:
        rejections: The rejections by row.
        pairs: Every row with every evaluation record that it overlaps with, whether or not a rejection names them; in
            any order, and some of them twice.
    """

    rejections: dict[int, Rejection]
    pairs: list[tuple[int, int]]


@dataclass(frozen=True)
class EvaluationIndex:
    """Indexes T evaluation records for a search. Built by `index_evaluation`.

    Attributes:
        where: ``file:line`` of every evaluation record.
        ids: Id of every evaluation record.
        inputs: Evaluation records by their ``input_id``.
        groups: First evaluation record by its group.
        word_index: Finds shared word n-grams; None: they are not searched.
        input_index: Finds similar inputs; None: they are not searched.
    """

    where: Sequence[str]
    ids: Sequence[str]
    inputs: dict[str, list[int]]
    groups: dict[str, int]
    word_index: WordIndex | None
    input_index: InputIndex | None

    def find(self, table: pa.Table) -> dict[int, Rejection]:
        """Finds the rows of a RECORD table that leak an evaluation record, each with the strongest reason."""
        return self.search(table).rejections

    def search(self, table: pa.Table, sharing: npt.NDArray[np.bool_] | None = None) -> Findings:
        """Finds the same rows as `find`, and all evaluation records that they leak.

        Args:
            sharing: bool [N]: no other row shares a run of words with an evaluation record; None: any may.
        """
        rejections: dict[int, Rejection] = {}
        pairs: list[tuple[int, int]] = []
        # Fingerprints have ruled out the other rows, whose texts are not hashed again.
        candidates = np.arange(table.num_rows) if sharing is None else np.flatnonzero(sharing)
        for first in range(0, table.num_rows, _ROWS_A_BLOCK):
            inside = candidates[(candidates >= first) & (candidates < first + _ROWS_A_BLOCK)] - first
            block = self._block(table.slice(first, _ROWS_A_BLOCK), inside.tolist())
            rejections.update((first + row, rejection) for row, rejection in block.rejections.items())
            pairs += ((first + row, other) for row, other in block.pairs)
        return Findings(rejections, pairs)

    def _block(self, table: pa.Table, sharing: Sequence[int]) -> Findings:
        rejections: dict[int, Rejection] = {}
        pairs: list[tuple[int, int]] = []
        rows = zip(table["input_id"].to_pylist(), table["group"].to_pylist(), strict=True)
        for row, (identity, group) in enumerate(rows):
            # The strongest reason comes first, as later ones only fill rows without a rejection.
            if (equal := self.inputs.get(identity)) is not None:
                # All pairs count, not only the one that is quoted: the report says how much of each suite leaks.
                pairs += ((row, other) for other in equal)
                rejections[row] = self._rejection(
                    "equals a test input", f"the same input as {self.where[equal[0]]}", equal[0]
                )
            # A group marks records that belong together, such as one user's: one of them leaks the others.
            elif group is not None and group in self.groups:
                other = self.groups[group]
                detail = f"group `{group}` is also that of {self.where[other]}"
                rejections[row] = self._rejection("group of a test record", detail, other)
        inputs, texts = input_texts(table), joined_texts(table)
        similar_inputs = (
            SimilarInputs({}, {}) if self.input_index is None else self.input_index.search(inputs, texts, pairs)
        )
        shared = self._sharing(inputs, texts, sharing, pairs)
        for row, (other, similarity) in similar_inputs.similar.items():
            detail = f"similarity {similarity:.2f} to {self.where[other]}"
            rejections.setdefault(row, self._rejection("like a test input", detail, other, similarity))
        for row, overlap in shared:
            rejections.setdefault(row, self._shared(overlap))
        for row, (other, share) in similar_inputs.contained.items():
            detail = f"{share:.0%} of the input of {self.where[other]} stands in it"
            rejections.setdefault(row, self._rejection("like a test input", detail, other, share))
        return Findings(rejections, pairs)

    def _sharing(
        self, inputs: Sequence[str], texts: Sequence[str], rows: Sequence[int], pairs: list[tuple[int, int]]
    ) -> Iterator[tuple[int, Overlap]]:
        """Yields shared runs of words, of these rows only."""
        if self.word_index is None or not rows:
            return
        pairs_of_index: list[tuple[int, int]] = []
        shared = self.word_index.search([inputs[row] for row in rows], [texts[row] for row in rows], pairs_of_index)
        pairs += ((rows[index], other) for index, other in pairs_of_index)
        for index, overlap in shared.items():
            yield rows[index], overlap

    def _shared(self, overlap: Overlap) -> Rejection:
        assert self.word_index is not None
        runs = f"{self.word_index.ngram}-gram"
        where = self.where[overlap.other]
        detail = f"the same words as {where}"
        if not overlap.whole:
            of_record, of_test = overlap.shared / overlap.own, overlap.shared / overlap.others
            detail = (
                f"{overlap.shared} {runs}s of {where}: {of_record:.0%} of this record's, {of_test:.0%} of that one's"
            )
        return self._rejection(f"shares a {runs} with a test record", detail, overlap.other, overlap.score)

    def _rejection(self, reason: str, detail: str, other: int, score: float | None = None) -> Rejection:
        return Rejection(reason, detail, score, kept=self.ids[other])


def index_evaluation(
    evaluation: pa.Table,
    *,
    ngram: int | None = 13,
    share: float = 0.0,
    threshold: float | None = 0.8,
    contained: float | None = 0.8,
    least_words: int = 8,
    over: Map = map,
) -> EvaluationIndex:
    """Builds an index; the settings are those of `posttrain.data.steps.decontaminate.Decontaminate`.

    The order of the records only decides which of equally good matches is named: the first.

    Args:
        evaluation: RECORD table of T rows.
        over: ``map``, or a parallel equivalent.
    """
    inputs: dict[str, list[int]] = {}
    groups: dict[str, int] = {}
    pairs = zip(evaluation["input_id"].to_pylist(), evaluation["group"].to_pylist(), strict=True)
    for row, (identity, group) in enumerate(pairs):
        inputs.setdefault(identity, []).append(row)
        if group is not None:
            # One record of a group is enough for the message.
            groups.setdefault(group, row)
    build_words = None if ngram is None else partial(WordIndex.from_records, evaluation, ngram, share)
    build_inputs = (
        None if threshold is None else partial(InputIndex.from_records, evaluation, threshold, contained, least_words)
    )
    # Hashing takes most of the time, and the two indexes share nothing: `over` may run them in two processes.
    word_index, input_index = over(_build, [build_words, build_inputs])
    return EvaluationIndex(
        where=locations(evaluation),
        ids=evaluation["id"].to_pylist(),
        inputs=inputs,
        groups=groups,
        word_index=word_index,
        input_index=input_index,
    )


def _build(part: Callable[[], Any] | None) -> Any:
    return None if part is None else part()


def contaminated_counts(evaluation: pa.Table, pairs: Iterable[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Counts for every source the evaluation records that training records leak, and all of them.

    Args:
        evaluation: RECORD table of T rows.
        pairs: The `Findings.pairs` of all training records.
    """
    # A set, as some pairs are listed twice.
    leaked = {other for _, other in pairs}
    sources = evaluation["source"].to_pylist()
    counts = Counter(source for row, source in enumerate(sources) if row in leaked)
    return {source: (counts[source], count) for source, count in Counter(sources).items()}


@dataclass(frozen=True)
class Prefilter:
    """Finds the sketches of training records that may overlap with some of the evaluation records.

    Attributes:
        input_ids, groups: Those of these evaluation records.
        marks: Marks of their runs of words; None: they are not searched.
        alike: Index of their inputs; None: they are not searched.
    """

    input_ids: pa.Array
    groups: pa.Array
    marks: Postings | None
    alike: InputIndex | None

    @classmethod
    def from_index(cls, evaluation: pa.Table, index: EvaluationIndex, mask: npt.NDArray[np.bool_]) -> Self:
        """Builds a prefilter for some of the T records of a RECORD table.

        Args:
            index: The index of all records.
            mask: bool [T].
        """
        subset = evaluation.filter(pa.array(mask))
        return cls(
            subset["input_id"].combine_chunks(),
            subset["group"].drop_null().combine_chunks(),
            index.word_index.marks.among(mask) if index.word_index else None,
            InputIndex.from_records(subset, input_index.threshold, input_index.contained, input_index.least_words)
            if (input_index := index.input_index)
            else None,
        )

    def likely(self, sketches: pa.Table) -> npt.NDArray[np.bool_]:
        """Marks rows, bool [N]: False only for those that overlap with none of the evaluation records."""
        equal = compute.or_kleene(
            compute.is_in(sketches["input_id"], self.input_ids), compute.is_in(sketches["group"], self.groups)
        )
        likely = np.array(equal.to_numpy(), dtype=bool)
        if self.marks is not None:
            likely |= rows_sharing_runs(sketches, self.marks)
        if self.alike is not None:
            least = np.asarray(sketches["least"].to_numpy(), dtype=np.int64)
            likely[self.alike.likely(BloomFilters(sketches["grams"]), least)] = True
        return likely


def rows_sharing_runs(sketches: pa.Table, marks: Postings) -> npt.NDArray[np.bool_]:
    """Marks rows, bool [N]: False only for those that share no run of words with the records of ``marks``."""
    column = sketches["runs"].combine_chunks()
    # Sketches keep the upper 32 bits of each fingerprint; the marks have the lower ones cleared, too.
    values = np.asarray(column.flatten().to_numpy(), dtype=np.uint64) << np.uint64(32)
    offsets = column.offsets.to_numpy().astype(np.int64)
    positions, _ = marks.find(values)
    sharing = np.zeros(len(column), dtype=bool)
    # The offsets of a slice do not begin at 0, but its flattened values do.
    sharing[owning_set(Shingles(values, offsets - offsets[0]), positions)] = True
    return sharing
