"""How the verbs of ``posttrain select`` show a labelled record in a table."""

from typing import Any

NAMES = ("label", "input", "record", "line")

_WIDTH = 60


def cells(record: dict[str, Any]) -> list[Any]:
    """What stands under `NAMES`, of ``label, input, id, source, line``."""
    return [record["label"], short(record["input"]), record["id"], f"{record['source']}:{record['line']}"]


def short(text: str) -> str:
    """The text on one line, cut where it is long."""
    words = " ".join(text.split())
    return words if len(words) <= _WIDTH else words[: _WIDTH - 1] + "…"
