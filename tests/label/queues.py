"""Queues with a clock that tests set, and batches for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem, QueueConfig
from posttrain.store.database import utc_now
from posttrain.store.journal import Journal
from posttrain.store.label_tables import accounts
from posttrain.store.metadata import Metadata
from posttrain.store.verify import verify_database

Open = Callable[..., Queue]

LABELS = ["card", "cash", "loan"]


@dataclass
class Clock:
    """A clock that stands still between two calls of `forward`."""

    time: datetime = field(default_factory=utc_now)

    def __call__(self) -> datetime:
        return self.time

    def forward(self, minutes: float) -> None:
        self.time += timedelta(minutes=minutes)


def add_accounts(metadata: Metadata, *names: str, role: str = "annotator") -> None:
    for name in names:
        metadata.insert_row(accounts, {"name": name, "role": role, "created_at": utc_now()})


def new_items(count: int, **values: Any) -> list[NewItem]:
    return [NewItem(f"r{number}", {"text": f"message {number}"}, **values) for number in range(count)]


def answer_all(queue: Queue, annotator: str, answer: str = "card") -> list[str]:
    """Answers items until there are none; returns their records."""
    records = []
    while (task := queue.next(annotator)) is not None:
        records.append(queue.item(task.item).record)
        queue.answer(task.item, annotator, answer)
    return records


def gold_items(answers: Sequence[str]) -> list[NewItem]:
    return [
        NewItem(f"gold{number}", {"text": f"known {number}"}, expected=answer) for number, answer in enumerate(answers)
    ]


class QueueFixtures:
    """A queue on the database of the fixture ``url``, whose rows are those of its journal in the end."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def journal(self, tmp_path: Path) -> Journal:
        return Journal(tmp_path / "journal.jsonl")

    @pytest.fixture
    def metadata(self, url: str, journal: Journal) -> Iterator[Metadata]:
        metadata = Metadata(url, create=True, journal=journal)
        yield metadata
        assert verify_database(metadata, journal) == []
        metadata.close()

    @pytest.fixture
    def queue(self, metadata: Metadata, clock: Clock) -> Open:
        """``queue(overlap=2)``: a queue with these settings."""
        return lambda **config: Queue(metadata, QueueConfig(**config), clock)
