"""What the verbs about versions share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.data.stored_version import Version
from posttrain.loop.config import CONFIG_FILE, read_config
from posttrain.store.config import StoreConfig
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

VersionArgument = Annotated[
    str, typer.Argument(help="name@v3, name@v2.3.1, name@tag, a name (its last version), or an artifact's id.")
]

_WIDTH = 60


@contextmanager
def opened_store(root: Path, *, write: bool = False) -> Iterator[Workspace]:
    """The workspace in ``root``, which needs no ``posttrain.yaml`` for its datasets; closed at the end."""
    config = read_config(root).store if (root / CONFIG_FILE).is_file() else StoreConfig()
    if not write and not (root / ".posttrain" / "format.json").exists():
        raise UserError("nothing is stored here yet", where=str(root), fix="posttrain data add FILE --name NAME")
    with Workspace.create(root, config) if write else Workspace.open(root, config, write=False) as workspace:
        yield workspace


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
