"""Batches of every kind, and files of them, for tests of formats."""

import csv
import json
from pathlib import Path
from typing import Any

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem

SUFFIXES = {"label-studio": ".json", "jsonl": ".jsonl", "csv": ".csv"}

_PROMPT = [{"role": "user", "content": "Ana paid 5 € in Rome"}]
_TURNS = [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "hi"}, *_PROMPT]

KINDS: dict[str, tuple[list[str] | None, dict[str, Any], Any, Any]] = {
    "choice": (["card", "cash"], {"prompt": _PROMPT}, "card", "cash"),
    "choices": (["card", "a#b", "=1+1"], {"prompt": _TURNS, "meta": {"n": 1, "text": "x"}}, ["card", "a#b"], []),
    "text": (None, {"text": "plain", "source": "pool.csv:3"}, "in words", "=SUM(A1)"),
    "spans": (["PER", "LOC"], {"prompt": _TURNS}, [{"start": 0, "end": 3, "label": "PER"}], []),
    "rewrite": (None, {"prompt": _PROMPT, "answer": "bad"}, "good", "better"),
    "rating": (None, {"prompt": _PROMPT, "answer": "bad"}, 4, 1),
    "preference": (None, {"prompt": _PROMPT, "candidates": ["one", "two"]}, 0, "tie"),
    "ranking": (None, {"prompt": _PROMPT, "candidates": ["one", "two", "three"]}, [2, 0, 1], [0, 1, 2]),
    "conversation": (None, {"prompt": _PROMPT}, [{"role": "assistant", "content": "ok"}], _TURNS[:2]),
}
"""Labels, an item's content and two answers of each kind."""


def fill(queue: Queue, kind: str) -> None:
    """Adds a batch of a kind with everything that can become of an item."""
    labels, content, first, second = KINDS[kind]
    items = [
        NewItem(f"r{n}", content, reason="unsure" if n == 1 else None, suggestion=_suggestion(first) if n % 2 else None)
        for n in range(6)
    ]
    queue.add_batch("batch", kind, items, labels=labels, gold=[NewItem("gold", content, expected=second)])
    ids = {item.record: item.id for item in queue.items("batch")}
    queue.answer(ids["r0"], "ana", first, seconds=0.0, note="sure")
    queue.answer(ids["r1"], "Zoë 李", second, seconds=2.5)
    queue.skip(ids["r2"], "ana", "I cannot tell")
    queue.flag(ids["r3"], "ana", "odd")
    queue.resolve(ids["r3"], "rita", second, "as the guideline says")
    queue.drop(ids["r4"], "rita", "no text")
    queue.answer(queue.items("batch", gold=True)[0].id, "ana", first)


def _suggestion(answer: Any) -> dict[str, Any]:
    return {"answer": answer, "confidence": 0.5, "annotator": "champion"}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a file without the code that is tested."""
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]


def answers_of(queue: Queue, batch: str) -> dict[str, list[tuple[str, Any]]]:
    """Returns the answers to each record of a batch, gold items included."""
    items = queue.items(batch) + queue.items(batch, gold=True)
    return {item.record: [(given.annotator, given.answer) for given in item.answers] for item in items}
