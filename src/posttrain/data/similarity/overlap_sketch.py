"""Sketches training records for the search for records that overlap with evaluation records."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash

from posttrain.data.arrays import Hashes
from posttrain.data.records.record import input_texts, joined_texts, plain_words
from posttrain.data.similarity.minhash import cached_minhash_sketch
from posttrain.data.similarity.ngrams import Shingles, hash_words, word_runs

LEAST_WORDS = 8  # of an input that is searched in longer texts; GPT-3's shortest run had as many
_SHORT_INPUT = 1024  # characters from which an input does not count as one of few words
MARGIN = 0.9  # bands of this part of the threshold miss about one in 100,000 inputs just at the threshold


def overlap_sketch(table: pa.Table, threshold: float | None, ngram: int | None) -> pa.Table:
    """Sketches each row of a RECORD table in one row, which serves all evaluation records.

    ``input_id`` and ``group`` are the record's. ``words``: hash of the words of an input of few words. ``runs``: the
    upper 32 bits of the hashes of its runs of 8 words, or of ``ngram`` if that is less. Further columns as in
    `posttrain.data.similarity.minhash.minhash_sketch`, of its input.

    Args:
        threshold, ngram: As in `EvaluationIndex.from_records`.
    """
    inputs = input_texts(table)
    columns = {"input_id": table["input_id"].combine_chunks(), "group": table["group"].combine_chunks()}
    if ngram is not None:
        columns["words"] = pa.array(few_words(inputs, ngram), pa.uint64())
        columns["runs"] = _list_column(word_runs(hash_words(joined_texts(table)), min(LEAST_WORDS, ngram)))
    if threshold is not None:
        bands = cached_minhash_sketch(tuple(inputs), threshold * MARGIN)
        columns |= dict(zip(bands.column_names, bands.columns, strict=True))
    return pa.table(columns)


def few_words(inputs: Sequence[str], ngram: int) -> list[int | None]:
    """Hashes the words of each input that has few, at least one; they are compared whole. None for all others."""
    most = max(LEAST_WORDS, ngram)
    plain = plain_words([text if len(text) < _SHORT_INPUT else "" for text in inputs])
    split = (text.split(None, most) for text in plain)
    return [xxhash.xxh3_64_intdigest(" ".join(few).encode()) if 0 < len(few) < most else None for few in split]


def upper_half(values: Hashes) -> Hashes:
    """Clears the lower 32 bits of each hash."""
    # 32 bits rule a row out nearly as well as 64, in half the space; the search itself compares all of them.
    return values >> np.uint64(32) << np.uint64(32)


def _list_column(sets: Shingles) -> pa.Array:
    halves = (sets.values >> np.uint64(32)).astype(np.uint32)
    return pa.ListArray.from_arrays(pa.array(sets.offsets.astype(np.int32)), pa.array(halves))


def list_values(column: pa.ChunkedArray) -> Shingles:
    """Returns the sets of a column that `overlap_sketch` wrote, as upper halves of 64 bits."""
    array = column.combine_chunks()
    # The offsets of a slice do not begin at 0, but its flattened values do.
    offsets = array.offsets.to_numpy().astype(np.int64)
    return Shingles(array.flatten().to_numpy().astype(np.uint64) << np.uint64(32), offsets - offsets[0])
