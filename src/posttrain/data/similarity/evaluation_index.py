"""Indexes the evaluation records, and finds the training records that overlap with them.

Both searches propose candidates by hashes, and compare the texts of the candidates exactly.

- Inputs are sets of character 5-grams. MinHash proposes pairs, or, where none may be missed, prefix filtering
  (Chaudhuri, Ganti and Kaushik, "A primitive operator for similarity joins in data cleaning", ICDE 2006): an input of
  Jaccard similarity t to one of n members holds at least k of the rarest ``n - ceil(t * n) + k`` of these.
- A run of 13 words holds six runs of 8 words. The smallest of their hashes is its mark. A record that shares the run
  has this mark among its own runs of 8 words, which a sketch keeps: a grown dataset hashes no earlier text again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.arrays import Floats, Hashes, Indices, Mask
from posttrain.data.records.record import input_texts, joined_texts, locations
from posttrain.data.similarity.hash_index import HashIndex
from posttrain.data.similarity.minhash import NGRAM, Sketches, minhash_sketch, required_matching_bits
from posttrain.data.similarity.ngrams import Shingles, hash_words, jaccard, ngram_sequences, ngram_sets, word_runs
from posttrain.data.similarity.overlap_sketch import LEAST_WORDS, MARGIN, few_words, list_values, upper_half

_MOST_RECORDS = 10  # that share a run; GPT-3 ignored runs in more than 10 documents, as the wording of the task
_MEMBERS_A_MATCH = 24  # one of so many members of a set must match before the sets are compared
_LEAST_MATCHES = 12  # fewer are shared by chance
_ROUNDING = 1e-9  # a product in float64 may lie just above a whole number, whose ceiling is one too many
_ROWS_A_BLOCK = 1024  # whose n-grams are held in memory
_PAIRS_A_BLOCK = 20_000  # whose n-grams are held in memory

Value = TypeVar("Value")


class Match(NamedTuple):
    """Describes what a training record shares with an evaluation record.

    Attributes:
        other: The evaluation record's row.
        reason: A category.
        detail: The beginning of a sentence that ends with the place of the evaluation record.
        score: The number that the decision rests on; None for equal names.
    """

    other: int
    reason: str
    detail: str
    score: float | None = None


@dataclass(frozen=True)
class Matches:
    """Holds the result of a search in a table of training records.

    Attributes:
        best: The strongest match by row.
        pairs: Every row with every evaluation record whose text it shares.
    """

    best: dict[int, Match] = field(default_factory=dict)
    pairs: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True)
class EvaluationIndex:
    """Indexes T evaluation records for a search.

    Attributes:
        where, ids: ``file:line`` and id of every record.
        inputs: Records by their ``input_id``.
        groups: First record by its group.
        short_inputs: Records by the hash of the words of their inputs, of those that have few.
        runs: Runs of words, of the record's texts and of each shorter input as a whole; owner: the record.
        marks: The marks of these runs.
        lengths: Words of these runs, longest first; none: runs are not searched.
        threshold: Jaccard similarity from which two inputs are alike; None: only equal ones are.
        grams: Character n-grams of the inputs.
        rare_grams: The rarest of these; owner: the record.
        needed: int64 [T], how many of its rarest n-grams an input alike holds at least.
        sketches: MinHash sketches of the inputs.
        bands: Their bands; owner: the record.
    """

    where: Sequence[str]
    ids: Sequence[str]
    inputs: Mapping[str, Sequence[int]]
    groups: Mapping[str, int]
    short_inputs: Mapping[int, Sequence[int]]
    runs: HashIndex
    marks: HashIndex
    lengths: Sequence[int]
    threshold: float | None
    grams: Shingles
    rare_grams: HashIndex
    needed: Indices
    sketches: Sketches
    bands: Sequence[HashIndex]

    @classmethod
    def from_records(cls, evaluation: pa.Table, threshold: float | None = 0.8, ngram: int | None = 13) -> Self:
        """Indexes a RECORD table; the order of records only decides which of equally good matches is named: the first.

        Args:
            threshold: Jaccard similarity from which two inputs are alike; None: only equal ones are.
            ngram: Words in a run; None: runs are not searched.
        """
        inputs = input_texts(evaluation)
        grams = ngram_sets(inputs if threshold else [], NGRAM)
        required = np.ceil((threshold or 1.0) * grams.sizes - _ROUNDING).astype(np.int64)
        # The more are needed, the fewer are compared in vain, and the more are indexed.
        needed = np.minimum(np.maximum(grams.sizes // _MEMBERS_A_MATCH, _LEAST_MATCHES), required)
        sketches = Sketches.from_table(minhash_sketch(inputs if threshold else [], (threshold or 1.0) * MARGIN))
        runs, marks, lengths = _index_runs(evaluation, inputs, ngram)
        return cls(
            where=locations(evaluation),
            ids=evaluation["id"].to_pylist(),
            inputs=_rows_by_value(evaluation["input_id"].to_pylist()),
            groups={name: rows[0] for name, rows in _rows_by_value(evaluation["group"].to_pylist()).items()},
            short_inputs=_rows_by_value(few_words(inputs, ngram) if ngram else []),
            runs=runs,
            marks=marks,
            lengths=lengths,
            threshold=threshold,
            grams=grams,
            rare_grams=HashIndex.from_hashes(*_rarest(grams, grams.sizes - required + needed)),
            needed=needed,
            sketches=sketches,
            bands=[HashIndex.from_hashes(keys, np.arange(len(keys))) for keys in sketches.bands],
        )

    def search(
        self,
        sketches: pa.Table,
        take: Callable[[Indices], pa.Table],
        alive: Indices | None = None,
        *,
        exact: bool = False,
    ) -> Matches:
        """Finds the rows that overlap with an evaluation record.

        Args:
            sketches: N rows made by `overlap_sketch` with these settings.
            take: Returns the RECORD table of some rows.
            alive: Rows to search, in order; None: all.
            exact: True to miss no similar input, which reads all texts.
        """
        rows = np.arange(sketches.num_rows) if alive is None else alive
        sharing = self._sharing_rows(sketches)
        row, other = self._proposed(Sketches.from_table(sketches))
        candidates = sharing.copy()
        candidates[row] = True
        rows = rows if exact else rows[candidates[rows]]
        table = take(rows)
        inputs, matches = input_texts(table), Matches()
        names = zip(rows.tolist(), table["input_id"].to_pylist(), table["group"].to_pylist(), strict=True)
        for number, identity, group in names:
            for same in self.inputs.get(identity, ()):
                _add(matches, number, Match(same, "equals a test input", "the same input as"))
            # A group marks records that belong together, such as one user's: one of them leaks the others.
            if group in self.groups and number not in matches.best:
                detail = f"its group `{group}` is also that of"
                matches.best[number] = Match(self.groups[group], "group of a test record", detail)
        if self.threshold is not None:
            living = np.isin(row, rows)
            pairs = [(np.searchsorted(rows, row[living]), other[living])]
            for position, match in self._similar(inputs, self._holding(inputs) if exact else pairs, self.threshold):
                _add(matches, int(rows[position]), match)
        if self.lengths:
            chosen = np.flatnonzero(sharing[rows])
            texts = joined_texts(table.take(pa.array(chosen)))
            for position, match in self._sharing([inputs[at] for at in chosen.tolist()], texts):
                _add(matches, int(rows[chosen[position]]), match)
        return matches

    def _sharing_rows(self, sketches: pa.Table) -> Mask:
        """Marks the rows that may overlap in another way than by similar inputs."""
        candidates = np.zeros(sketches.num_rows, dtype=bool)
        for name, values in (("input_id", self.inputs), ("group", self.groups), ("words", self.short_inputs)):
            if values:
                known = pa.array(list(values), sketches.schema.field(name).type)
                candidates |= compute.is_in(sketches[name], known).to_numpy()
        if self.lengths:
            runs = list_values(sketches["runs"])
            positions, _ = self.marks.find(runs.values)
            candidates[np.searchsorted(runs.offsets, positions, side="right") - 1] = True
        return candidates

    def _proposed(self, sketches: Sketches) -> tuple[Indices, Indices]:
        """Lists the pairs of a row and a record whose inputs agree in a band and in enough bits."""
        codes = [np.empty(0, dtype=np.int64)]
        for index, keys in zip(self.bands, sketches.bands, strict=False):
            for row, other, _ in index.shared(Shingles(keys, np.arange(len(keys) + 1))):
                agreeing = np.bitwise_count(~(sketches.bits[row] ^ self.sketches.bits[other]))
                enough = agreeing >= required_matching_bits((self.threshold or 1.0) * MARGIN)
                codes.append((row[enough] << 32) + other[enough])
        rows, others = np.divmod(np.unique(np.concatenate(codes)), 1 << 32)
        return rows, others

    def _holding(self, inputs: Sequence[str]) -> Iterator[tuple[Indices, Indices]]:
        """Yields the pairs of a row and a record of whose rarest n-grams the input holds enough."""
        for start in range(0, len(inputs), _ROWS_A_BLOCK):
            grams = ngram_sequences(inputs[start : start + _ROWS_A_BLOCK], NGRAM)
            for row, other, count in self.rare_grams.shared(grams):
                enough = count >= self.needed[other]
                yield start + row[enough], other[enough]

    def _similar(
        self, inputs: Sequence[str], pairs: Iterable[tuple[Indices, Indices]], threshold: float
    ) -> Iterator[tuple[int, Match]]:
        """Yields the proposed pairs that are alike, most similar ones first."""
        for row, other in pairs:
            similarity = np.concatenate([np.empty(0), *self._similarities(inputs, row, other)])
            for pair in np.lexsort((other, -similarity, row)).tolist():
                if similarity[pair] >= threshold:
                    detail = f"similarity {similarity[pair]:.2f} to"
                    yield int(row[pair]), Match(int(other[pair]), "like a test input", detail, float(similarity[pair]))

    def _similarities(self, inputs: Sequence[str], row: Indices, other: Indices) -> Iterator[Floats]:
        for start in range(0, len(row), _PAIRS_A_BLOCK):
            block = slice(start, start + _PAIRS_A_BLOCK)
            rows, index = np.unique(row[block], return_inverse=True)
            own = ngram_sets([inputs[row] for row in rows.tolist()], NGRAM)
            yield jaccard(own, self.grams, index, other[block])

    def _sharing(self, inputs: Sequence[str], texts: Sequence[str]) -> Iterator[tuple[int, Match]]:
        """Yields the texts that share runs of words, those with the longest and the most shared runs first."""
        ngram = self.lengths[0]
        for row, whole in enumerate(few_words(inputs, ngram)):
            for other in () if whole is None else self.short_inputs.get(whole, ()):
                yield row, Match(other, "like a test input", "the same words as", 1.0)
        hashes = hash_words(texts)
        for length in self.lengths:
            for rows, others, counts in self.runs.shared(word_runs(hashes, length)):
                for pair in np.lexsort((others, -counts, rows)).tolist():
                    count = int(counts[pair])
                    reason, detail = f"shares a {length}-gram with a test record", f"{count} {length}-grams of"
                    if length < ngram:
                        reason, detail = "holds a test input", f"all {length} words of the input of"
                    yield int(rows[pair]), Match(int(others[pair]), reason, detail, float(count))


def contaminated_counts(evaluation: pa.Table, pairs: Iterable[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Counts for every source the evaluation records that training records leak, and all of them.

    Args:
        evaluation: RECORD table of T rows.
        pairs: The `Matches.pairs` of all training records.
    """
    leaked = {other for _, other in pairs}
    sources = evaluation["source"].to_pylist()
    counts = Counter(source for row, source in enumerate(sources) if row in leaked)
    return {source: (counts[source], count) for source, count in Counter(sources).items()}


def _add(matches: Matches, row: int, match: Match) -> None:
    """Adds a match; stronger reasons come first, so that the first match of a row is its best."""
    matches.best.setdefault(row, match)
    # All pairs count, not only the one that is quoted: the report says how much of each suite leaks.
    matches.pairs.add((row, match.other))


def _rows_by_value(values: Iterable[Value | None]) -> dict[Value, list[int]]:
    rows: dict[Value, list[int]] = {}
    for row, value in enumerate(values):
        if value is not None:
            rows.setdefault(value, []).append(row)
    return rows


def _index_runs(
    evaluation: pa.Table, inputs: Sequence[str], ngram: int | None
) -> tuple[HashIndex, HashIndex, list[int]]:
    """Indexes runs of ``ngram`` words and shorter inputs of 8 words or more as wholes, and the marks of both."""
    hashes, marks, owners, lengths = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], [np.empty(0, np.int64)], []
    whole_inputs = hash_words(inputs if ngram else [])
    for length in [] if ngram is None else [ngram, *range(ngram - 1, LEAST_WORDS - 1, -1)]:
        texts = whole_inputs if length < ngram else hash_words(joined_texts(evaluation))
        runs = word_runs(texts, length)
        owner = np.repeat(np.arange(evaluation.num_rows), runs.sizes)
        wanted = np.full(len(owner), True) if length == ngram else whole_inputs.sizes[owner] == length
        if length == ngram or wanted.any():
            lengths.append(length)
            hashes.append(runs.values[wanted])
            marks.append(_marks(texts, runs, length)[wanted])
            owners.append(owner[wanted])
    values, owner = np.concatenate(hashes), np.concatenate(owners)
    distinctive = ~np.isin(values, _wording(values, owner, evaluation))
    owner = owner[distinctive]
    marks_index = HashIndex.from_hashes(upper_half(np.concatenate(marks)[distinctive]), owner)
    return HashIndex.from_hashes(values[distinctive], owner), marks_index, lengths


def _marks(words: Shingles, runs: Shingles, length: int) -> Hashes:
    """Returns the smallest hash of the runs of up to 8 words in each of the runs of ``length`` words."""
    shorter = word_runs(words, min(LEAST_WORDS, length))
    at = np.arange(len(runs.values)) + np.repeat(shorter.offsets[:-1] - runs.offsets[:-1], runs.sizes)
    smallest = shorter.values[at]
    for further in range(1, length - min(LEAST_WORDS, length) + 1):
        smallest = np.minimum(smallest, shorter.values[at + further])
    return smallest


def _wording(hashes: Hashes, owners: Indices, evaluation: pa.Table) -> Hashes:
    """Returns the hashes that too many records hold."""
    # A record of two suites is one record, not two uses of its wording.
    ids = evaluation["id"].combine_chunks().dictionary_encode().indices.to_numpy()
    usage = HashIndex.from_hashes(hashes, ids[owners])
    return usage.keys[np.diff(usage.offsets) > _MOST_RECORDS]


def _rarest(sets: Shingles, counts: Indices) -> tuple[Hashes, Indices]:
    """Returns the ``counts[n]`` rarest members of every set, and the set of each."""
    _, inverse, frequency = np.unique(sets.values, return_inverse=True, return_counts=True)
    owner = np.repeat(np.arange(len(sets.sizes)), sets.sizes)
    order = np.lexsort((sets.values, frequency[inverse], owner))
    kept = np.arange(len(owner)) - sets.offsets[owner] < counts[owner]
    return sets.values[order][kept], owner[kept]
