"""A team, two versions of a guideline and batches of every kind, for tests of the pages and their pictures."""

from typing import Any

from posttrain.label.accounts import Accounts
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem, QueueConfig
from posttrain.store.workspace import Workspace

PASSWORD = "correct horse battery"
TEAM = {"olga": "owner", "rosa": "reviewer", "anna": "annotator", "ben": "annotator", "chloe": "annotator"}

INTENTS = ["card_declined", "charged_twice", "refund_status", "refund_request", "order_status", "late_delivery"]

GUIDELINE = """# Intents

Choose what the customer **wants**, not what went wrong.

| label | when |
| --- | --- |
| `refund_request` | asks for money back |
| `refund_status` | has asked already, and waits |

## Hard to tell

1. *"Where is my money?"* without an order: `refund_status`.
2. Two wishes: the first one counts.
"""

MESSAGES = [
    ("I sent the shoes back two weeks ago. Where is my money?", "refund_status", 0.87),
    ("My card was refused though there is enough on it.", "card_declined", 0.94),
    ("You took the 49.90 twice!", "charged_twice", 0.91),
    ("Parcel said Tuesday, today is Friday.", "late_delivery", 0.66),
    ("I'd like my money back, the lamp is broken.", "refund_request", 0.72),
    ("Has my order been sent yet? 🙂 Order 5521.", "order_status", 0.58),
]

TURNS = [
    {"role": "system", "content": "You help customers of an online shop. Be brief."},
    {"role": "user", "content": "My parcel has not come."},
    {"role": "assistant", "content": "I am sorry. What is the number of your order?"},
    {"role": "user", "content": "5521. It should have been here on Tuesday."},
]
ANSWERS = [
    "Order 5521 left our warehouse on Monday and is with the carrier; it should reach you tomorrow.",
    "Parcels are sometimes late.",
    "Please call the carrier and ask them. Here is the number: 555-0100.",
]


def add_team(store: Workspace) -> Accounts:
    accounts = Accounts(store.metadata)
    for name, role in TEAM.items():
        accounts.add(name, role, "terminal", PASSWORD)
    return accounts


def messages(count: int = 6, **values: Any) -> list[NewItem]:
    """Customers' messages, each with a suggestion and why it was selected."""
    items = []
    for number in range(count):
        text, label, confidence = MESSAGES[number % len(MESSAGES)]
        suggestion = {"answer": label, "confidence": confidence, "annotator": "champion"}
        reason = "entropy 1.21, in the top 6% of the pool; nearest chosen record of 12 others"
        defaults = {"suggestion": suggestion, "reason": reason}
        content = {"prompt": [{"role": "user", "content": text}], "meta": {"channel": "mail", "order": 5500 + number}}
        items.append(NewItem(f"m{number:04d}", content, **{**defaults, **values}))
    return items


KINDS: dict[str, tuple[dict[str, Any], list[str] | None, Any]] = {
    "choice": ({"prompt": TURNS}, INTENTS, "late_delivery"),
    "choices": ({"text": "You took 49.90 twice, and the parcel is late."}, INTENTS, ["charged_twice"]),
    "text": ({"prompt": TURNS}, None, None),
    "spans": ({"text": "👋 Anna Meyer ordered the lamp in Berlin."}, ["person", "city", "product"], None),
    "rewrite": ({"prompt": TURNS, "answer": ANSWERS[1]}, None, None),
    "rating": ({"prompt": TURNS, "answer": ANSWERS[0]}, None, None),
    "preference": ({"prompt": TURNS, "candidates": ANSWERS[:2]}, None, None),
    "ranking": ({"prompt": TURNS, "candidates": ANSWERS}, None, None),
    "conversation": ({"prompt": TURNS}, None, None),
}
"""An item of each kind: its content, labels and suggested answer."""


def add_kind(queue: Queue, kind: str, name: str | None = None) -> None:
    """Adds a batch of one item of a kind."""
    content, labels, suggested = KINDS[kind]
    suggestion = None if suggested is None else {"answer": suggested, "confidence": 0.81, "annotator": "champion"}
    items = [NewItem(f"{kind}-1", content, suggestion=suggestion)]
    queue.add_batch(name or kind, kind, items, labels=labels)


def many_labels() -> list[str]:
    """77 labels, as many as Banking77 has."""
    topics = [
        "card",
        "cash",
        "transfer",
        "top_up",
        "exchange",
        "refund",
        "pin",
        "account",
        "fee",
        "identity",
        "direct_debit",
    ]
    return [
        f"{topic}_{matter}"
        for topic in topics
        for matter in ("lost", "late", "limit", "failed", "charge", "change", "help")
    ]


def add_batches(store: Workspace) -> Queue:
    """Adds two versions of the guideline, an open batch, one with disagreements, and items of two more kinds."""
    queue = Queue(store.metadata, QueueConfig(overlap=2, check=0.0))
    queue.add_guideline(GUIDELINE.replace("2. Two wishes: the first one counts.\n", ""), "rosa", "first version")
    queue.add_batch("round-3", "choice", messages(42), labels=INTENTS, round=3)
    for name, offset in (("anna", 0), ("ben", 1), ("chloe", 2)):
        while (task := queue.next(name, "round-3")) is not None:
            right = task.suggestion["answer"] if task.suggestion else INTENTS[0]
            is_hard = task.item % 9 == 1
            answer = (
                INTENTS[(INTENTS.index(right) + offset * (1 + task.item // 9 % 3)) % len(INTENTS)] if is_hard else right
            )
            note = "could be both" if is_hard and name == "ben" else None
            queue.answer(task.item, name, answer, note=note, seconds=3.0 + offset + task.item % 4)
    queue.add_guideline(GUIDELINE, "rosa", "says what counts where there are two wishes")
    queue.add_batch("round-4", "choice", messages(24), labels=INTENTS, round=4)
    for _ in range(9):
        task = queue.next("ben", "round-4")
        assert task is not None
        queue.answer(task.item, "ben", task.suggestion["answer"] if task.suggestion else INTENTS[0], seconds=4.0)
    for kind in ("spans", "preference"):
        add_kind(queue, kind)
    return queue
