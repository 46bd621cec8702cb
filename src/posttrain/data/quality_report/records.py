"""What is counted of the records of a set while they pass."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.data.quality_report.balance import Balance, balance
from posttrain.data.quality_report.columns import text_parts
from posttrain.data.quality_report.distribution import Collector, Distribution
from posttrain.data.quality_report.sample import Smallest, hashes
from posttrain.data.quality_report.words import word_count

Tokenizer = Callable[[list[str]], Sequence[Sequence[int]]]
"""Token ids of each of some texts, such as
``lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]`` with a tokenizer of transformers."""

ALL = "all"
_MOST_LABELS = 1000
_SAMPLED_CHARACTERS = 2000


class Sampled(NamedTuple):
    """A record of the sample: its id, and the beginnings of its texts."""

    id: str
    input: str
    answer: str


@dataclass
class RecordCounts:
    """Everything that one pass over RECORD tables counts; its size does not depend on how many records pass."""

    tokenizer: Tokenizer | None
    sample: Smallest[Sampled]
    seed: int
    records: int = 0
    answered: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    _labels: Counter[tuple[str, str]] = field(default_factory=Counter)
    _open_ended: bool = False
    _lengths: dict[str, Collector] = field(default_factory=dict)
    _totals: Counter[str] = field(default_factory=Counter)

    def add(self, table: pa.Table, splits: Sequence[str | None] | None) -> None:
        """Count the rows of a RECORD table [N]; ``splits`` names the side of each, if there are sides.

        Raises:
            ValueError: ``splits`` is not as long as the table.
        """
        if splits is not None and len(splits) != table.num_rows:
            raise ValueError(f"{len(splits)} names of splits for {table.num_rows} records")
        self.records += table.num_rows
        self.sources.update(source or "unknown" for source in table["source"].to_pylist())
        sides = [ALL] * table.num_rows if splits is None else [side or "none" for side in splits]
        if splits is not None:
            self.splits.update(sides)
        parts = text_parts(table)
        self._add_lengths(parts)
        self._add_answers(table["completion"], sides)
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
        """Whether answers are texts rather than labels: more than 1000 different ones, or fewer than two of each."""
        return self._open_ended or len({label for _, label in self._labels}) * 2 > self.answered

    def balances(self) -> dict[str, Balance]:
        """Of all labelled records, and of each split's if there are any; nothing where answers are no labels."""
        if self.open_ended or not self._labels:
            return {}
        sides: dict[str, Counter[str]] = {name: Counter() for name in (ALL, *sorted(self.splits))}
        for (side, label), count in self._labels.items():
            for name in {ALL, side}:
                sides[name][label] += count
        return {side: balance(counts) for side, counts in sides.items() if counts}

    def _add_lengths(self, parts: dict[str, pa.Array]) -> None:
        for part, texts in parts.items():
            known = texts.drop_null()
            words = known.to_pylist()
            counted = {
                "characters": pc.utf8_length(known).to_numpy(zero_copy_only=False),
                "words": np.array([word_count(text) for text in words]),
            }
            if self.tokenizer is not None:
                counted["tokens"] = np.array([len(ids) for ids in self.tokenizer(words)])
            for unit, lengths in counted.items():
                name = f"{part} {unit}"
                self._lengths.setdefault(name, Collector()).add(lengths.astype(np.float64))
                self._totals[name] += int(lengths.sum())

    def _add_answers(self, answers: pa.ChunkedArray, sides: Sequence[str]) -> None:
        self.answered += len(answers) - answers.null_count
        if self._open_ended:
            return
        pairs = zip(sides, answers.to_pylist(), strict=True)
        self._labels.update((side, answer) for side, answer in pairs if answer is not None)
        if len({label for _, label in self._labels}) > _MOST_LABELS:
            self._open_ended = True
            self._labels.clear()

    def _add_sample(self, ids: list[str], parts: dict[str, pa.Array]) -> None:
        order = hashes(ids, self.seed)
        for row in self.sample.wanted(order).tolist():
            texts = [
                (parts[part][row].as_py() or "")[:_SAMPLED_CHARACTERS] if part in parts else ""
                for part in ("input", "answer")
            ]
            self.sample.add(int(order[row]), ids[row], Sampled(ids[row], *texts))
