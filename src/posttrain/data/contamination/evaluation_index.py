"""An index of the evaluation records, which finds the training records that give them away."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.contamination.input_index import InputIndex, SimilarInputs
from posttrain.data.contamination.word_index import Overlap, WordIndex
from posttrain.data.duplicates.dense_buckets import Map
from posttrain.data.records.outcome import Rejection, locations
from posttrain.data.records.texts import input_texts, joined_texts

_ROWS_A_BLOCK = 256  # so that what is made of them fits a processor's cache


class Findings(NamedTuple):
    """What is wrong with a table of training records.

    Attributes:
        rejections: by row.
        pairs: every row and evaluation record of which the one gives away the content of the other, whether or not a
            rejection names them; in any order, and some of them twice.
    """

    rejections: dict[int, Rejection]
    pairs: list[tuple[int, int]]


@dataclass(frozen=True)
class EvaluationIndex:
    """T evaluation records, ready to be looked for. Made by `index_evaluation`.

    Attributes:
        where: ``file:line`` of every evaluation record.
        ids: of every evaluation record.
        inputs: by ``input_id`` the evaluation records that have it.
        groups: by group its first evaluation record.
        words: finds shared word n-grams; None: they are not looked for.
        alike: finds inputs that are alike; None: they are not looked for.
    """

    where: Sequence[str]
    ids: Sequence[str]
    inputs: dict[str, list[int]]
    groups: dict[str, int]
    words: WordIndex | None
    alike: InputIndex | None

    def find(self, table: pa.Table) -> dict[int, Rejection]:
        """The rows of a RECORD table that give something away, each with the strongest reason."""
        return self.search(table).rejections

    def search(self, table: pa.Table, sharing: npt.NDArray[np.bool_] | None = None) -> Findings:
        """As `find`, with all evaluation records that are given away.

        Args:
            sharing: bool [N]: no other row shares a run of words with an evaluation record; None: any may.
        """
        rejections: dict[int, Rejection] = {}
        pairs: list[tuple[int, int]] = []
        asked = np.arange(table.num_rows) if sharing is None else np.flatnonzero(sharing)
        for first in range(0, table.num_rows, _ROWS_A_BLOCK):
            inside = asked[(asked >= first) & (asked < first + _ROWS_A_BLOCK)] - first
            block = self._block(table.slice(first, _ROWS_A_BLOCK), inside.tolist())
            rejections.update((first + row, rejection) for row, rejection in block.rejections.items())
            pairs += ((first + row, other) for row, other in block.pairs)
        return Findings(rejections, pairs)

    def _block(self, table: pa.Table, sharing: Sequence[int]) -> Findings:
        found: dict[int, Rejection] = {}
        pairs: list[tuple[int, int]] = []
        rows = zip(table["input_id"].to_pylist(), table["group"].to_pylist(), strict=True)
        for row, (identity, group) in enumerate(rows):
            if (equal := self.inputs.get(identity)) is not None:
                pairs += ((row, other) for other in equal)
                found[row] = self._rejection(
                    "equals a test input", f"the same input as {self.where[equal[0]]}", equal[0]
                )
            elif group is not None and group in self.groups:
                other = self.groups[group]
                detail = f"group `{group}` is also that of {self.where[other]}"
                found[row] = self._rejection("group of a test record", detail, other)
        inputs, texts = input_texts(table), joined_texts(table)
        alike = SimilarInputs({}, {}) if self.alike is None else self.alike.search(inputs, texts, pairs)
        shared = self._sharing(inputs, texts, sharing, pairs)
        for row, (other, similarity) in alike.similar.items():
            detail = f"similarity {similarity:.2f} to {self.where[other]}"
            found.setdefault(row, self._rejection("like a test input", detail, other, similarity))
        for row, overlap in shared:
            found.setdefault(row, self._shared(overlap))
        for row, (other, share) in alike.contained.items():
            detail = f"{share:.0%} of the input of {self.where[other]} stands in it"
            found.setdefault(row, self._rejection("like a test input", detail, other, share))
        return Findings(found, pairs)

    def _sharing(
        self, inputs: Sequence[str], texts: Sequence[str], rows: Sequence[int], pairs: list[tuple[int, int]]
    ) -> Iterator[tuple[int, Overlap]]:
        """By row, of those rows alone."""
        if self.words is None or not rows:
            return
        found: list[tuple[int, int]] = []
        shared = self.words.search([inputs[row] for row in rows], [texts[row] for row in rows], found)
        pairs += ((rows[place], other) for place, other in found)
        for place, overlap in shared.items():
            yield rows[place], overlap

    def _shared(self, overlap: Overlap) -> Rejection:
        assert self.words is not None
        runs = f"{self.words.ngram}-gram"
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
    ignore_above: int | None = 10,
    over: Map = map,
) -> EvaluationIndex:
    """An index of evaluation records; the settings are those of `posttrain.data.contamination.decontaminate.Decontaminate`.

    The order of the records decides nothing but which of equally fitting ones is named: the first.

    Args:
        evaluation: RECORD table of T rows.
        over: ``map`` or what does the same with several processes.
    """
    inputs: dict[str, list[int]] = {}
    groups: dict[str, int] = {}
    pairs = zip(evaluation["input_id"].to_pylist(), evaluation["group"].to_pylist(), strict=True)
    for row, (identity, group) in enumerate(pairs):
        inputs.setdefault(identity, []).append(row)
        if group is not None:
            groups.setdefault(group, row)
    of_words = None if ngram is None else partial(WordIndex.of, evaluation, ngram, share, ignore_above)
    of_inputs = None if threshold is None else partial(InputIndex.of, evaluation, threshold, contained, least_words)
    words, alike = over(_build, [of_words, of_inputs])
    return EvaluationIndex(
        where=locations(evaluation),
        ids=evaluation["id"].to_pylist(),
        inputs=inputs,
        groups=groups,
        words=words,
        alike=alike,
    )


def _build(part: Callable[[], Any] | None) -> Any:
    return None if part is None else part()


def contaminated_counts(evaluation: pa.Table, pairs: Iterable[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Of every source of evaluation records how many of them are given away, and how many there are.

    Args:
        evaluation: RECORD table of T rows.
        pairs: the `Findings.pairs` of all training records.
    """
    given_away = {other for _, other in pairs}
    sources = evaluation["source"].to_pylist()
    found = Counter(source for row, source in enumerate(sources) if row in given_away)
    return {source: (found[source], count) for source, count in Counter(sources).items()}
