"""Counts records, labels and the facts that steps measured, in one pass over their tables."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.data.records.provenance import record_kinds
from posttrain.data.report.distribution import Distribution, DistributionBuilder
from posttrain.data.report.ngrams import word_count
from posttrain.data.report.sample import BottomKSample, id_hashes

Tokenizer = Callable[[list[str]], Sequence[Sequence[int]]]
"""Token ids of each of some texts, such as
``lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]`` with a tokenizer of transformers."""

ALL = "all"

_MOST_LABELS = 1000

_SAMPLED_CHARACTERS = 2000  # of each text, so that a sample of long documents stays small

ANY = "any kind"

_LANGUAGES = ("language", "lang")

_MOST_WORDS = 1000


class Sampled(NamedTuple):
    """Holds a sampled record's id and the beginnings of its texts."""

    id: str
    input: str
    answer: str


@dataclass(frozen=True)
class LabelBalance:
    """Records by label, most common first.

    Attributes:
        entropy: Shannon entropy of the labels' shares, in bits; ``log2`` of the number of labels if all are as common.
        evenness: entropy over that greatest one (Pielou 1966), between 0 and 1; 1 for a single label.
        imbalance: the most common label's count over the least common one's, of those that occur.
    """

    counts: dict[str, int]
    entropy: float
    evenness: float
    imbalance: float

    def to_json(self) -> dict[str, Any]:
        return {
            "labels": len(self.counts),
            "entropy_bits": self.entropy,
            "evenness": self.evenness,
            "imbalance_ratio": self.imbalance,
            "counts": self.counts,
        }


@dataclass
class RecordCounts:
    """Everything that one pass over RECORD tables counts; its size does not depend on how many records pass."""

    tokenizer: Tokenizer | None
    sample: BottomKSample[Sampled]
    seed: int
    records: int = 0
    answered: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    _labels: Counter[tuple[str, str]] = field(default_factory=Counter)
    _open_ended: bool = False
    _lengths: dict[str, DistributionBuilder] = field(default_factory=dict)
    _totals: Counter[str] = field(default_factory=Counter)

    def add(self, table: pa.Table, splits: Sequence[str | None] | None) -> None:
        """Counts the rows of a RECORD table [N]; ``splits`` names the side of each, if there are sides.

        Raises:
            ValueError: ``splits`` is not as long as the table.
        """
        if splits is not None and len(splits) != table.num_rows:
            raise ValueError(f"{len(splits)} names of splits for {table.num_rows} records")
        self.records += table.num_rows
        self.sources.update(source or "unknown" for source in table["source"].to_pylist())
        self.kinds.update(record_kinds(table["meta"]))
        row_splits = [ALL] * table.num_rows if splits is None else [split or "none" for split in splits]
        if splits is not None:
            self.splits.update(row_splits)
        parts = text_parts(table)
        self._add_lengths(parts)
        self._add_answers(table["completion"], row_splits)
        self._add_sample(table["id"].to_pylist(), parts)

    @property
    def lengths(self) -> dict[str, Distribution]:
        """By part and unit, such as ``input characters``."""
        return {name: collector.distribution() for name, collector in self._lengths.items()}

    @property
    def totals(self) -> dict[str, int]:
        """The sums of the lengths, by the same names."""
        return dict(self._totals)

    @property
    def open_ended(self) -> bool:
        """True if answers are texts rather than labels: more than 1000 different ones, or fewer than two of each."""
        return self._open_ended or len({label for _, label in self._labels}) * 2 > self.answered

    def balances(self) -> dict[str, LabelBalance]:
        """Balances of all labelled records and of each split's; empty if answers are not labels."""
        if self.open_ended or not self._labels:
            return {}
        by_split: dict[str, Counter[str]] = {name: Counter() for name in (ALL, *sorted(self.splits))}
        for (split, label), count in self._labels.items():
            for name in {ALL, split}:
                by_split[name][label] += count
        return {split: label_balance(counts) for split, counts in by_split.items() if counts}

    def _add_lengths(self, parts: dict[str, pa.Array]) -> None:
        for part, texts in parts.items():
            present = texts.drop_null()
            present_texts = present.to_pylist()
            counted = {
                "characters": pc.utf8_length(present).to_numpy(zero_copy_only=False),
                "words": np.array([word_count(text) for text in present_texts]),
            }
            if self.tokenizer is not None:
                counted["tokens"] = np.array([len(ids) for ids in self.tokenizer(present_texts)])
            for unit, lengths in counted.items():
                name = f"{part} {unit}"
                self._lengths.setdefault(name, DistributionBuilder()).add(lengths.astype(np.float64))
                self._totals[name] += int(lengths.sum())

    def _add_answers(self, answers: pa.ChunkedArray, row_splits: Sequence[str]) -> None:
        # Counted before the return below: the share of answered records is wanted of open answers too.
        self.answered += len(answers) - answers.null_count
        if self._open_ended:
            return
        pairs = zip(row_splits, answers.to_pylist(), strict=True)
        self._labels.update((split, answer) for split, answer in pairs if answer is not None)
        if len({label for _, label in self._labels}) > _MOST_LABELS:
            self._open_ended = True
            # From here on labels are never read, so their memory, which would grow with the set, is freed.
            self._labels.clear()

    def _add_sample(self, ids: list[str], parts: dict[str, pa.Array]) -> None:
        order = id_hashes(ids, self.seed)
        for row in self.sample.wanted(order).tolist():
            texts = [
                (parts[part][row].as_py() or "")[:_SAMPLED_CHARACTERS] if part in parts else ""
                for part in ("input", "answer")
            ]
            self.sample.add(int(order[row]), ids[row], Sampled(ids[row], *texts))


class Hits(NamedTuple):
    """Finds of one kind: how many, and in how many records."""

    hits: int
    records: int


@dataclass
class FactCounts:
    """Numbers become distributions; words are counted, and given up where more than 1000 different ones come.

    A fact is called by its name, behind its step's where it does not begin with that. The language is the words of a
    fact with the name ``language`` or ``lang``. Facts of steps whose name begins with ``pii`` count finds: a number is
    how many of the kind in its name (``pii_email``; ``pii`` is all kinds), words are kinds with commas between.
    """

    languages: Counter[str] = field(default_factory=Counter)
    _numbers: dict[str, DistributionBuilder] = field(default_factory=dict)
    _words: dict[str, Counter[str] | None] = field(default_factory=dict)
    _hits: Counter[str] = field(default_factory=Counter)
    _records: Counter[str] = field(default_factory=Counter)

    def add(self, table: pa.Table) -> None:
        """Counts the rows of a FACT table."""
        for group in table.group_by(["step", "name"], use_threads=False).aggregate([]).to_pylist():
            step, name = group["step"], group["name"]
            matches = pc.and_(pc.equal(table["step"], step), pc.equal(table["name"], name))
            rows = table.filter(matches)
            numbers = rows["value"].drop_null().to_numpy()
            texts = rows["text"].drop_null()
            if step.startswith("pii"):
                self._add_hits(ANY if name == "pii" else name.removeprefix("pii_"), numbers, texts)
                continue
            full_name = name if name.startswith(step) else f"{step}: {name}"
            if len(numbers):
                self._numbers.setdefault(full_name, DistributionBuilder()).add(numbers)
            if len(texts):
                self._add_words(name, full_name, texts)

    @property
    def scores(self) -> dict[str, Distribution]:
        return {name: collector.distribution() for name, collector in self._numbers.items()}

    @property
    def categories(self) -> dict[str, dict[str, int]]:
        """Counts of each fact in words, most common first; a fact with too many different ones has none."""
        return {name: descending(counts or Counter()) for name, counts in self._words.items()}

    @property
    def pii(self) -> dict[str, Hits]:
        return {kind: Hits(hits, self._records[kind]) for kind, hits in descending(self._hits).items()}

    def _add_hits(self, kind: str, numbers: npt.NDArray[np.float64], texts: pa.ChunkedArray) -> None:
        finite = numbers[np.isfinite(numbers)]
        if hits := int(finite.sum()):
            self._hits[kind] += hits
            self._records[kind] += int((finite > 0).sum())
        for text in texts.to_pylist():
            kinds = Counter(word.strip() for word in text.split(",") if word.strip())
            self._hits.update(kinds)
            self._records.update(kinds.keys())

    def _add_words(self, name: str, full_name: str, texts: pa.ChunkedArray) -> None:
        new_counts = {row["values"]: row["counts"] for row in pc.value_counts(texts).to_pylist()}
        if name in _LANGUAGES:
            self.languages.update(new_counts)
            return
        counts = self._words.setdefault(full_name, Counter())
        if counts is not None:
            counts.update(new_counts)
            if len(counts) > _MOST_WORDS:
                # None, not a removed key: the next table must not start to count it again.
                self._words[full_name] = None


def descending(counts: Counter[str]) -> dict[str, int]:
    """Returns the counts as a dictionary, most common first, equal ones by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def label_balance(counts: Mapping[str, int]) -> LabelBalance:
    """Computes the balance of at least one label, each with at least one record."""
    ordered = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    numbers = np.array(list(ordered.values()), dtype=np.float64)
    shares = numbers / numbers.sum()
    # Rounding can push the entropy of a single label below zero.
    entropy = max(0.0, -float(shares @ np.log2(shares)))
    # A single label has no greatest entropy to divide by, and is as even as it can be.
    evenness = entropy / float(np.log2(len(shares))) if len(shares) > 1 else 1.0
    return LabelBalance(ordered, entropy, evenness, float(numbers.max() / numbers.min()))


def input_column(table: pa.Table) -> pa.Array:
    """Computes `posttrain.data.records.record.input_texts` as a string array [N]; null for a record without
    input."""
    prompt = table["prompt"].combine_chunks()
    turns = prompt.flatten()
    # Arrow joins a million prompts at once, where a Python loop over turns would take most of the report's time.
    owners = np.repeat(np.arange(len(prompt)), pc.fill_null(pc.list_value_length(prompt), 0).to_numpy())
    visible = pc.fill_null(pc.not_equal(turns.field("role"), "system"), True)
    counts = np.bincount(owners[visible.to_numpy(zero_copy_only=False)], minlength=len(prompt))
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    contents = pc.fill_null(turns.field("content").filter(visible), "")
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, contents), "\n")
    return pc.if_else(prompt.is_valid(), joined, table["text"].combine_chunks())


def text_parts(table: pa.Table) -> dict[str, pa.Array]:
    """Returns a string array [N] for each part of a record that has a text, null where a record lacks it."""
    parts = {
        "input": input_column(table),
        "answer": table["completion"].combine_chunks(),
        "worse answer": table["rejected"].combine_chunks(),
    }
    return {name: texts for name, texts in parts.items() if texts.null_count < len(texts)}
