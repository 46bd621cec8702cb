"""The table of answers that the quality measures read: one row for each answer of each annotator."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ANSWERS = pa.schema(
    [
        # Id of the item; several annotators may answer one.
        pa.field("item", pa.int64(), nullable=False),
        pa.field("record", pa.string(), nullable=False),
        pa.field("batch", pa.string(), nullable=False),
        pa.field("annotator", pa.string(), nullable=False),
        # A label of the closed set, or an open-ended answer as canonical JSON.
        pa.field("answer", pa.string(), nullable=False),
        # The right answer of a gold item; null for the others.
        pa.field("expected", pa.string()),
        # The item's final answer, and how it was reached; null while it is open.
        pa.field("resolution", pa.string()),
        pa.field("resolved_by", pa.string()),
        # The suggestion as this annotator saw it, and whether it was a planted wrong one.
        pa.field("suggestion", pa.string()),
        pa.field("planted", pa.bool_(), nullable=False),
        pa.field("seconds", pa.float64()),
        pa.field("confidence", pa.float64()),
        pa.field("checked", pa.bool_(), nullable=False),
        # Whether it is the one more answer that an item is given because the others differ.
        pa.field("deciding", pa.bool_(), nullable=False),
        pa.field("guideline", pa.int64(), nullable=False),
        pa.field("created_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""Rows are in the order in which the answers were given. Skipped and undone answers are not among them."""


@dataclass(frozen=True)
class Votes:
    """Answers as integers; N of them.

    Attributes:
        item: int64 [N], index into ``items``.
        annotator: int64 [N], index into ``annotators``.
        label: int64 [N], index into ``labels``.
        rows: int64 [N], the row of the table that each vote comes from, ascending.
        items: int64 [U], ids of the items, ascending.
        annotators: Names, sorted.
        labels: Distinct answers, sorted.
    """

    item: Integers
    annotator: Integers
    label: Integers
    rows: Integers
    items: Integers
    annotators: tuple[str, ...]
    labels: tuple[str, ...]

    def label_index(self, answers: Sequence[str | None]) -> Integers:
        """Returns the index of each answer in ``labels``; -1 for None and for an answer that nobody gave."""
        index = {label: at for at, label in enumerate(self.labels)}
        return np.array([-1 if answer is None else index.get(answer, -1) for answer in answers], np.int64)


def encode_votes(answers: pa.Table) -> Votes:
    """Encodes a table of answers.

    Args:
        answers: Table of the schema `ANSWERS`.

    Returns:
        One vote for each annotator and item: of several, the last.
    """
    items, item = np.unique(answers["item"].to_numpy(), return_inverse=True)
    annotators, annotator = _encode(answers["annotator"].to_pylist())
    names, label = _encode(answers["answer"].to_pylist())
    # Of two answers to one item the later one counts, as it corrects the earlier.
    key = item * max(len(annotators), 1) + annotator
    _, last = np.unique(key[::-1], return_index=True)
    rows = np.sort(len(key) - 1 - last)
    return Votes(item[rows], annotator[rows], label[rows], rows, items, annotators, names)


@dataclass(frozen=True)
class SharedItems:
    """The S items that two annotators both answered: int64 [S] each, items ascending, with both labels."""

    first: int
    second: int
    items: Integers
    left: Integers
    right: Integers


def shared_items(votes: Votes, least: int = 1) -> Iterator[SharedItems]:
    """Yields every pair of annotators that shares at least ``least`` items."""
    # Here, as every verb reads the config and with it this module.
    from scipy import sparse

    shape = (len(votes.annotators), len(votes.items))
    given = sparse.csr_array((np.ones(len(votes.item)), (votes.annotator, votes.item)), shape=shape)
    # Counted first: of a large team most pairs share nothing.
    number = sparse.triu(given @ given.T, k=1).tocoo()
    answers = []
    for index in range(len(votes.annotators)):
        own = np.flatnonzero(votes.annotator == index)
        order = own[np.argsort(votes.item[own])]
        answers.append((votes.item[order], votes.label[order]))
    for first, second, count in sorted(zip(*(part.tolist() for part in (*number.coords, number.data)), strict=True)):
        if count >= least:
            (left, labels), (right, others) = answers[first], answers[second]
            items, at, other = np.intersect1d(left, right, assume_unique=True, return_indices=True)
            yield SharedItems(first, second, items, labels[at], others[other])


def answers_of_people(answers: pa.Table) -> pa.Table:
    """Returns the answers of people: those without a confidence, which only models state."""
    return answers.filter(compute.is_null(answers["confidence"]))


def answers_of_agreement(answers: pa.Table) -> pa.Table:
    """Returns the answers that measures of agreement read: without those that were asked for because others differ.

    With them items with a disagreement would have more answers than the rest, and weigh more: in pairs, three times.
    """
    return answers.filter(compute.invert(answers["deciding"]))


def mark_deciding(items: Sequence[int], wanted: Mapping[int, int]) -> list[bool]:
    """Returns for each answer whether it is the one that its item was given beyond those wanted at first.

    Args:
        items: The item of each answer, in the order in which they were given.
        wanted: Answers wanted before there is a disagreement, by item; an item that is missing has no deciding answer.
            Where there are two or more beyond them, they were imported, and none of them decides.
    """
    counts, before = Counter(items), Counter[int]()
    marks = []
    for item in items:
        first = wanted.get(item, 0)
        marks.append(first > 1 and counts[item] == first + 1 and before[item] == first)
        before[item] += 1
    return marks


def _encode(values: Sequence[str]) -> tuple[tuple[str, ...], Integers]:
    names = tuple(sorted(set(values)))
    index = {name: at for at, name in enumerate(names)}
    return names, np.array([index[value] for value in values], np.int64)
