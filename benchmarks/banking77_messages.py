"""Draws small sets of messages of Banking77, each with its intent as the answer."""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path

LONGEST = 60  # characters of a message

Message = dict[str, str]


def draw_intents(data: Path, count: int, of: int | None = None) -> list[str]:
    """Returns the first ``count`` of ``of`` intents that are drawn at random."""
    return random.Random(0).sample(sorted(_by_intent(data / "banking77_train.csv")), of or count)[:count]


def draw_messages(data: Path, intents: Sequence[str], file: str = "train") -> dict[str, list[Message]]:
    """Returns the records of each intent, shuffled; ``file`` is ``train`` or ``test``."""
    by_intent = _by_intent(data / f"banking77_{file}.csv")
    records = {}
    for intent in intents:
        texts = sorted(by_intent[intent])
        random.Random(1).shuffle(texts)
        records[intent] = [{"prompt": text, "completion": answer(intent)} for text in texts]
    return records


def answer(intent: str) -> str:
    """Returns an intent as a model is to write it."""
    return intent.replace("_", " ")


def write_records(path: Path, records: Sequence[Message]) -> None:
    """Writes records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _by_intent(path: Path) -> dict[str, list[str]]:
    by_intent: dict[str, list[str]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if len(row["text"]) <= LONGEST:
                by_intent.setdefault(row["category"], []).append(row["text"])
    return by_intent
