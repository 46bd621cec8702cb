"""The queue's settings and rows: batches, items as annotators and reviewers see them, and what became of them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from numbers import Real
from typing import Any

from pydantic import Field

from posttrain.label.answer_kinds import Question
from posttrain.store.errors import UserError, shorten
from posttrain.store.section import Section


class QueueConfig(Section):
    """How items are given to people. A batch keeps the settings that it was added under."""

    overlap: int = Field(1, ge=1, le=20, description="Annotators an item; one more is asked where they disagree.")
    check: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the items with one answer that a second annotator answers too, without seeing the first "
        "answer; null: 0.05 where two or more people have accounts, else 0.",
    )
    gold_file: str | None = Field(
        None, description="File of records with right answers, mixed in to measure annotators; null: none."
    )
    gold_rate: float = Field(0.05, ge=0, le=0.5, description="Share of the items shown that are from the gold file.")
    gold_threshold: float = Field(
        0.7,
        ge=0,
        le=1,
        description="An annotator who has fewer of ten or more gold items right is given no more items.",
    )
    planted_rate: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Share of the suggestions replaced by wrong ones, to measure how often they are accepted unread.",
    )


class PausedError(UserError):
    """The annotator is given no items for the time being; the message is for its person."""


@dataclass(frozen=True)
class NewItem:
    """An item to add.

    Attributes:
        record: Id of its record, once in a batch.
        content: As in `posttrain.label.answer_kinds.Question`.
        priority: Of two items the one with the higher priority is shown first; None: in the order given.
        suggestion: ``answer``, ``confidence`` and ``annotator`` of a model's answer; None for none.
        reason: Why the record was selected, in words.
        expected: The right answer of a gold item; None for an item whose answer is asked for.
    """

    record: str
    content: Mapping[str, Any]
    priority: float | None = None
    suggestion: Mapping[str, Any] | None = None
    reason: str | None = None
    expected: Any = None


@dataclass(frozen=True)
class Task(Question):
    """An item as its annotator sees it: whether it is a gold item, a check or has a planted suggestion is not in it.

    Attributes:
        suggestion: ``answer``, ``confidence`` and ``annotator``; None where there is none.
        guideline: Version of the guideline that counts now; 0 before there is one.
        ends_at: When the lease ends; None for an item that is not leased.
    """

    item: int
    batch: str
    kind: str
    suggestion: Mapping[str, Any] | None
    reason: str | None
    guideline: int
    ends_at: datetime | None


@dataclass(frozen=True)
class Receipt:
    """A stored answer, skip or flag.

    Attributes:
        repeated: True if it was there already: the same submission came twice.
        status: The item's status after it.
        paused: The sentence to its person if the account was paused after this answer.
    """

    answer_id: int
    repeated: bool
    status: str
    paused: str | None = None


@dataclass(frozen=True)
class Batch:
    """A batch.

    Attributes:
        settings: The section ``label.queue`` as it was, with ``seed``, ``check`` and the number of ``gold`` items.
    """

    name: str
    round: int | None
    selection: str | None
    kind: str
    labels: Sequence[str] | None
    settings: Mapping[str, Any]
    status: str
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True)
class Progress:
    """Progress of a batch; gold items are not counted.

    Attributes:
        items: Number of items: those that are open, in review, done and dropped.
        answers: Answers that count.
        left: Answers that are still wanted; 0 in a closed batch.
        rate: Answers an hour, of the last hour in which there were any; None before the second answer.
        done_at: When the last answer is expected; None if nothing is left or the rate is unknown.
    """

    batch: str
    status: str
    items: int
    open: int
    review: int
    done: int
    dropped: int
    answers: int
    left: int
    rate: float | None
    done_at: datetime | None

    @property
    def resolved(self) -> int:
        """Number of items that need nobody any more."""
        return self.done + self.dropped

    @property
    def undecided(self) -> int:
        """Number of items that are open or in review; in a closed batch they stay so."""
        return self.open + self.review


@dataclass(frozen=True)
class GivenAnswer:
    """An annotator's answer, skip or flag that counts."""

    id: int
    annotator: str
    status: str
    answer: Any
    note: str | None
    seconds: float | None
    suggestion: Mapping[str, Any] | None
    confidence: float | None
    guideline: int
    created_at: datetime


@dataclass(frozen=True)
class Item(Question):
    """An item as reviewers and the loop see it.

    Attributes:
        resolution: ``answer``, ``how`` (single, majority, posterior, review, model, skip), ``by`` (names), ``note``;
            None while the item is open.
        answers: All that count, in the order in which they were given.
    """

    id: int
    batch: str
    record: str
    kind: str
    priority: float
    suggestion: Mapping[str, Any] | None
    reason: str | None
    expected: Any
    wanted: int
    answered: int
    checked: bool
    status: str
    resolution: Mapping[str, Any] | None
    answers: Sequence[GivenAnswer] = ()

    @property
    def cause(self) -> str | None:
        """Why it is in review: flagged, skipped or disagreement; None if it is not."""
        if self.status != "review":
            return None
        statuses = {given.status for given in self.answers}
        if "flagged" in statuses:
            return "flagged"
        return "skipped" if self.answered < self.wanted else "disagreement"

    @property
    def seconds(self) -> float | None:
        """The time that all answers together took; None where it is unknown."""
        times = [given.seconds for given in self.answers if given.seconds is not None]
        return sum(times) if times else None


def hash_fraction(*parts: object) -> float:
    """Returns a number in [0, 1) that depends on the parts alone, so that a repeated draw has the same outcome."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big") / 256**7


def is_drawn_evenly(rate: float, number: int, *parts: object) -> bool:
    """Returns whether the draw of this number is a hit: one at a random place among each ``1 / rate`` numbers.

    Independent draws would leave one annotator of twenty without any of 60 items at a rate of 5%, and measure another
    by seven.

    Args:
        rate: Share of hits, below 1.
        number: From 0.
        parts: Decide the places.
    """
    block = int(number * rate)
    # A block may begin between two numbers: its hit may be the last number of the one before.
    return rate > 0 and any(
        number == int((each + hash_fraction("even", *parts, each)) / rate) for each in (block, block + 1)
    )


def check_confidence(value: Any, where: str | None = None) -> None:
    """Checks that a model's confidence is a probability, or None where it is not known.

    Raises:
        UserError: it is neither, such as NaN or 2.0.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1):
        what = f"{shorten(str(value))} is not a possible value of `confidence`"
        raise UserError(what, where=where, fix="give 0 to 1, or nothing")
