"""What the verbs about versions share."""

from typing import Annotated, Any

import typer

from posttrain.data.stored_version import Version
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

VersionArgument = Annotated[
    str, typer.Argument(help="name@v3, name@v2.3.1, name@tag, a name (its last version), or an artifact's id.")
]

_WIDTH = 60


def stored_version(store: Workspace, text: str) -> Version:
    """The version that a name, ``name@vN`` or an id says.

    Raises:
        UserError: there is none.
    """
    id = store.metadata.named(text) or store.metadata.resolve(text)
    row = store.metadata.artifact(id)
    if row is None or row.kind != "dataset":
        raise UserError(f"`{text}` is no dataset version", fix="posttrain data list")
    return Version.open(store.artifacts, id)


def shown_record(record: dict[str, Any]) -> list[Any]:
    """Id, input (shortened), answer, file and line."""
    return [record["id"], shown_input(record), record["completion"], record["source"], record["line"]]


def shown_rejection(record: dict[str, Any]) -> list[Any]:
    """Id, input (shortened), step, reason and detail."""
    return [record["id"], shown_input(record), record["step"], record["reason"], record["detail"]]


def shown_input(record: dict[str, Any]) -> str:
    """The record's input on one line of at most 60 characters."""
    words = record["text"] or " / ".join(turn["content"] for turn in record["prompt"] or [])
    words = " ".join(words[: 4 * _WIDTH].split())
    return words if len(words) <= _WIDTH else words[: _WIDTH - 1] + "…"


RECORD_COLUMNS = ["id", "input", "answer", "file", "line"]
REJECTION_COLUMNS = ["id", "input", "step", "reason", "detail"]
