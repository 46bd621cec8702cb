"""Keeps what a search for contamination needs, so that growth searches only what is new.

Sketches of training records find those that may give away new evaluation records, without their texts; the state holds
the findings of the search before.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.contamination.evaluation_index import EvaluationIndex, Findings
from posttrain.data.contamination.hash_index import STRETCH, BloomFilters, Postings, build_bloom_filters, owning_set
from posttrain.data.contamination.input_index import NGRAM, InputIndex
from posttrain.data.contamination.word_index import fingerprints, short_inputs
from posttrain.data.duplicates.shingles import Shingles, ngram_sequences, offsets_of, select_sets
from posttrain.data.records.identity import plain_words
from posttrain.data.records.outcome import Rejection
from posttrain.data.records.texts import input_texts, joined_texts

_CHARACTERS_A_BLOCK = 1 << 20

_KINDS = 4096  # of 5-grams, to count them by

_UNREPEATED = 2 * NGRAM  # an input from which on its 5-grams are among those of the whole record

_EVALUATION_KEYS = b"evaluation"

_KEY_BYTES = 16

_REJECTION = [
    ("reason", pa.string()),
    ("detail", pa.string()),
    ("score", pa.float64()),
    ("kept", pa.string()),
]


def contamination_sketch(table: pa.Table, ngram: int | None, alike: bool) -> pa.Table:
    """Sketches each row of a RECORD table in one row.

    ``input_id`` and ``group`` are the record's. ``runs``: list of uint32, fingerprints of its runs of words. ``grams``:
    bitmaps of its 5-grams. ``least``: int32, a lower bound of its input's distinct 5-grams, if there are
    several bitmaps.

    Args:
        ngram: words in a run; None: no fingerprints.
        alike: whether to build bitmaps.
    """
    blocks = [_sketch_block(block, ngram, alike) for block in _blocks_of_rows(table)] or [
        _sketch_block(table, ngram, alike)
    ]
    columns = [pa.concat_arrays([block[name] for block in blocks]) for name in blocks[0]]
    known = table.select(["input_id", "group"])
    return pa.table([*known.columns, *columns], names=[*known.column_names, *blocks[0]])


def _blocks_of_rows(table: pa.Table) -> Iterator[pa.Table]:
    """Cuts the table into blocks whose hashes take little memory."""
    lengths = np.fromiter(map(len, joined_texts(table)), np.int64, table.num_rows)
    # Hashes take 8 bytes a character; blocks keep them in the processor's cache.
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // _CHARACTERS_A_BLOCK)) + 1
    borders = [0, *cuts.tolist(), table.num_rows]
    for begin, end in pairwise(borders):
        yield table.slice(begin, end - begin)


def _sketch_block(table: pa.Table, ngram: int | None, alike: bool) -> dict[str, pa.Array]:
    inputs, texts = input_texts(table), joined_texts(table)
    columns: dict[str, pa.Array] = {}
    if ngram is not None:
        marks = _with_inputs(fingerprints(plain_words(texts), ngram), inputs, ngram)
        offsets, values = marks.offsets.astype(np.int32), (marks.values >> np.uint64(32)).astype(np.uint32)
        columns["runs"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    if alike:
        grams = ngram_sequences(texts, NGRAM)
        short = np.array([row for row, text in enumerate(inputs) if len(text) < _UNREPEATED], dtype=np.int64)
        # An input of few characters has n-grams that the whole record lacks, so they are added to its bitmap.
        columns["grams"] = build_bloom_filters(
            grams, ngram_sequences([inputs[row] for row in short.tolist()], NGRAM), short
        )
        columns["least"] = pa.array(_min_distinct_grams(grams, inputs, texts))
    return columns


def _min_distinct_grams(grams: Shingles, inputs: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.int32]:
    least = np.zeros(len(texts), dtype=np.int32)
    long = np.flatnonzero(grams.sizes > STRETCH)
    alone = np.array([inputs[row] == texts[row] for row in long.tolist()], dtype=bool)
    for rows, own in (
        (long[alone], select_sets(grams, long[alone])),
        (long[~alone], ngram_sequences([inputs[row] for row in long[~alone].tolist()], NGRAM)),
    ):
        kinds = np.zeros(len(rows) * _KINDS, dtype=bool)
        kinds[np.repeat(np.arange(len(rows)) * _KINDS, own.sizes) + (own.values % _KINDS).astype(np.int64)] = True
        least[rows] = kinds.reshape(-1, _KINDS).sum(axis=1)
    return least


def _with_inputs(marks: Shingles, inputs: list[str], ngram: int) -> Shingles:
    """Adds fingerprints of inputs of few words, which are also compared whole."""
    few, rows = short_inputs(inputs, ngram)
    whole = fingerprints(few, ngram)
    owner = np.concatenate(
        [owning_set(marks, np.arange(len(marks.values))), rows[owning_set(whole, np.arange(len(rows)))]]
    )
    order = np.argsort(owner, kind="stable")
    return Shingles(
        np.concatenate([marks.values, whole.values])[order], offsets_of(np.bincount(owner, minlength=len(inputs)))
    )


@dataclass(frozen=True)
class Prefilter:
    """Finds the sketches of training records that may give away some of the evaluation records.

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
    def of(cls, evaluation: pa.Table, index: EvaluationIndex, wanted: npt.NDArray[np.bool_]) -> Self:
        """Builds a prefilter for some of the T records of a RECORD table.

        Args:
            index: of all of them.
            wanted: bool [T].
        """
        subset = evaluation.filter(pa.array(wanted))
        return cls(
            subset["input_id"].combine_chunks(),
            subset["group"].drop_null().combine_chunks(),
            index.word_index.marks.among(wanted) if index.word_index else None,
            InputIndex.of(subset, input_index.threshold, input_index.contained, input_index.least_words)
            if (input_index := index.input_index)
            else None,
        )

    def likely(self, sketches: pa.Table) -> npt.NDArray[np.bool_]:
        """Bool [N]: False only for rows that give none of the evaluation records away."""
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
    """Bool [N]: False only for rows that share no run of words with the evaluation records of ``marks``."""
    column = sketches["runs"].combine_chunks()
    values = np.asarray(column.flatten().to_numpy(), dtype=np.uint64) << np.uint64(32)
    offsets = column.offsets.to_numpy().astype(np.int64)
    positions, _ = marks.find(values)
    sharing = np.zeros(len(column), dtype=bool)
    sharing[owning_set(Shingles(values, offsets - offsets[0]), positions)] = True
    return sharing


@dataclass(frozen=True)
class PreviousFindings:
    """Holds the findings of an earlier search, by the row numbers of today's evaluation records.

    Attributes:
        seen: bool [K], the training records that it looked at.
        fresh: bool [T], the evaluation records that it did not look for.
        findings: of the rows seen.
    """

    seen: npt.NDArray[np.bool_]
    fresh: npt.NDArray[np.bool_]
    findings: Findings


def encode_state(seen: npt.NDArray[np.bool_], findings: Findings, evaluation: pa.Table) -> pa.Table:
    """Stores findings in one row a training record, and the evaluation records' keys in the metadata.

    Args:
        seen: bool [N], the records that were looked at.
        findings: all of them.
        evaluation: RECORD table of what was looked for.
    """
    rejections = dict(sorted(findings.rejections.items()))
    others: dict[int, set[int]] = {}
    for row, other in findings.pairs:
        others.setdefault(row, set()).add(other)
    columns = {
        name: _scatter(
            rejections, pa.array([getattr(rejection, name) for rejection in rejections.values()], kind), len(seen)
        )
        for name, kind in _REJECTION
    }
    lists = pa.array([sorted(indices) for indices in others.values()], pa.list_(pa.int32()))
    columns["others"] = _scatter(others, lists, len(seen))
    return pa.table({"seen": pa.array(seen), **columns}).replace_schema_metadata(
        {_EVALUATION_KEYS: b"".join(_record_keys(evaluation)).hex()}
    )


def _scatter(rows: Iterable[int], values: pa.Array, count: int) -> pa.Array:
    """Spreads values over ``count`` rows: the given ones at their rows, null elsewhere."""
    position = np.full(count, -1, dtype=np.int64)
    position[list(rows)] = np.arange(len(values))
    return values.take(pa.array(position, mask=position < 0))


def decode_state(state: pa.Table, evaluation: pa.Table) -> PreviousFindings | None:
    """Reads what `encode_state` stored; None unless all evaluation records of then are among today's."""
    looked_for = bytes.fromhex((state.schema.metadata or {}).get(_EVALUATION_KEYS, b"").decode())
    keys_before = [looked_for[start : start + _KEY_BYTES] for start in range(0, len(looked_for), _KEY_BYTES)]
    row_of_key = {key: row for row, key in enumerate(_record_keys(evaluation))}
    # Keys must be unique and still there, or stored row numbers could not be translated.
    if (
        len(row_of_key) < evaluation.num_rows
        or len(set(keys_before)) < len(keys_before)
        or not row_of_key.keys() >= set(keys_before)
    ):
        return None
    fresh = np.ones(evaluation.num_rows, dtype=bool)
    positions = [row_of_key[key] for key in keys_before]
    fresh[positions] = False
    rows = np.flatnonzero(state["reason"].is_valid().to_numpy())
    reasons = state.select([name for name, _ in _REJECTION]).take(pa.array(rows)).to_pylist()
    rejections = {row: Rejection(**values) for row, values in zip(rows.tolist(), reasons, strict=True)}
    paired = np.flatnonzero(state["others"].is_valid().to_numpy())
    lists = state["others"].take(pa.array(paired)).to_pylist()
    pairs = [(row, positions[other]) for row, others in zip(paired.tolist(), lists, strict=True) for other in others]
    return PreviousFindings(np.array(state["seen"].to_numpy(), dtype=bool), fresh, Findings(rejections, pairs))


def _record_keys(evaluation: pa.Table) -> list[bytes]:
    """Hashes to 16 bytes all of a record that a finding can mention."""
    columns = (evaluation[name].to_pylist() for name in ("id", "group", "source", "line"))
    return [
        hashlib.blake2b(repr(values).encode(), digest_size=_KEY_BYTES).digest() for values in zip(*columns, strict=True)
    ]
