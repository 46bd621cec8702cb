"""Queues with a clock that tests set, and batches for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.store.database import utc_now
from posttrain.store.label_tables import accounts
from posttrain.store.metadata import Metadata

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
