"""What is kept of training records, so that those that may give away new evaluation records are found without texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.contamination.gram_filters import STRETCH, GramFilters, gram_filters
from posttrain.data.contamination.index import Index
from posttrain.data.contamination.likeness import NGRAM, InputIndex
from posttrain.data.contamination.overlap import few_words
from posttrain.data.contamination.postings import Postings, set_of
from posttrain.data.contamination.winnowing import fingerprints
from posttrain.data.duplicates.shingles import Shingles, members, offsets_of, runs
from posttrain.data.records.normalise import input_texts, texts_of
from posttrain.data.records.words import plain_words

_CHARACTERS_A_BLOCK = 1 << 20
_KINDS = 4096  # of 5-grams, to count them by
_UNREPEATED = 2 * NGRAM  # an input from which on its 5-grams are among those of the whole record


def sketch(table: pa.Table, ngram: int | None, alike: bool) -> pa.Table:
    """One row a row of the RECORD table.

    ``input_id`` and ``group`` are the record's. ``runs``: list of uint32, fingerprints of its runs of words. ``grams``:
    bitmaps of its 5-grams. ``least``: int32, how many different 5-grams its input has at least, where there are
    several bitmaps.

    Args:
        ngram: words in a run; None: no fingerprints.
        alike: whether there are bitmaps.
    """
    blocks = [_sketch(block, ngram, alike) for block in _blocks(table)] or [_sketch(table, ngram, alike)]
    columns = [pa.concat_arrays([block[name] for block in blocks]) for name in blocks[0]]
    known = table.select(["input_id", "group"])
    return pa.table([*known.columns, *columns], names=[*known.column_names, *blocks[0]])


def _blocks(table: pa.Table) -> Iterator[pa.Table]:
    """Rows whose hashes fit into little memory."""
    lengths = np.fromiter(map(len, texts_of(table)), np.int64, table.num_rows)
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // _CHARACTERS_A_BLOCK)) + 1
    borders = [0, *cuts.tolist(), table.num_rows]
    for begin, end in pairwise(borders):
        yield table.slice(begin, end - begin)


def _sketch(table: pa.Table, ngram: int | None, alike: bool) -> dict[str, pa.Array]:
    inputs, texts = input_texts(table), texts_of(table)
    columns: dict[str, pa.Array] = {}
    if ngram is not None:
        found = _with_inputs(fingerprints(plain_words(texts), ngram), inputs, ngram)
        offsets, values = found.offsets.astype(np.int32), (found.values >> np.uint64(32)).astype(np.uint32)
        columns["runs"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    if alike:
        grams = runs(texts, NGRAM)
        short = np.array([row for row, text in enumerate(inputs) if len(text) < _UNREPEATED], dtype=np.int64)
        columns["grams"] = gram_filters(grams, runs([inputs[row] for row in short.tolist()], NGRAM), short)
        columns["least"] = pa.array(_least(grams, inputs, texts))
    return columns


def _least(grams: Shingles, inputs: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.int32]:
    least = np.zeros(len(texts), dtype=np.int32)
    long = np.flatnonzero(grams.sizes > STRETCH)
    alone = np.array([inputs[row] == texts[row] for row in long.tolist()], dtype=bool)
    for rows, own in (
        (long[alone], members(grams, long[alone])),
        (long[~alone], runs([inputs[row] for row in long[~alone].tolist()], NGRAM)),
    ):
        kinds = np.zeros(len(rows) * _KINDS, dtype=bool)
        kinds[np.repeat(np.arange(len(rows)) * _KINDS, own.sizes) + (own.values % _KINDS).astype(np.int64)] = True
        least[rows] = kinds.reshape(-1, _KINDS).sum(axis=1)
    return least


def _with_inputs(found: Shingles, inputs: list[str], ngram: int) -> Shingles:
    """Inputs of few words are compared whole besides."""
    few, rows = few_words(inputs, ngram)
    whole = fingerprints(few, ngram)
    owner = np.concatenate([set_of(found, np.arange(len(found.values))), rows[set_of(whole, np.arange(len(rows)))]])
    order = np.argsort(owner, kind="stable")
    return Shingles(
        np.concatenate([found.values, whole.values])[order], offsets_of(np.bincount(owner, minlength=len(inputs)))
    )


@dataclass(frozen=True)
class Prefilter:
    """Finds the sketches of the training records that may give away some of the evaluation records.

    Attributes:
        input_ids, groups: of these evaluation records.
        marks: those of their runs of words; None: they are not looked for.
        alike: their inputs; None: they are not looked for.
    """

    input_ids: pa.Array
    groups: pa.Array
    marks: Postings | None
    alike: InputIndex | None

    @classmethod
    def of(cls, evaluation: pa.Table, index: Index, wanted: npt.NDArray[np.bool_]) -> Self:
        """Looks for some of the T records of a RECORD table.

        Args:
            index: of all of them.
            wanted: bool [T].
        """
        some = evaluation.filter(pa.array(wanted))
        return cls(
            some["input_id"].combine_chunks(),
            some["group"].drop_null().combine_chunks(),
            index.words.marks.among(wanted) if index.words else None,
            InputIndex.of(some, alike.threshold, alike.contained, alike.least_words)
            if (alike := index.alike)
            else None,
        )

    def likely(self, sketches: pa.Table) -> npt.NDArray[np.bool_]:
        """Bool [N]: none of the others gives one of the evaluation records away."""
        equal = compute.or_kleene(
            compute.is_in(sketches["input_id"], self.input_ids), compute.is_in(sketches["group"], self.groups)
        )
        found = np.array(equal.to_numpy(), dtype=bool)
        if self.marks is not None:
            found |= sharing(sketches, self.marks)
        if self.alike is not None:
            least = np.asarray(sketches["least"].to_numpy(), dtype=np.int64)
            found[self.alike.likely(GramFilters(sketches["grams"]), least)] = True
        return found


def sharing(sketches: pa.Table, marks: Postings) -> npt.NDArray[np.bool_]:
    """Bool [N]: none of the others shares a run of words with an evaluation record; ``marks``: of a `WordIndex`."""
    column = sketches["runs"].combine_chunks()
    values = np.asarray(column.flatten().to_numpy(), dtype=np.uint64) << np.uint64(32)
    offsets = column.offsets.to_numpy().astype(np.int64)
    places, _ = marks.find(values)
    found = np.zeros(len(column), dtype=bool)
    found[set_of(Shingles(values, offsets - offsets[0]), places)] = True
    return found
