"""What the verbs about versions share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.shared import errors, print_table
from posttrain.store.config import CONFIG_FILE, StoreConfig
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace

if TYPE_CHECKING:
    from posttrain.data.reading.paths import Place
    from posttrain.data.versions.stored_version import Version

VersionArgument = Annotated[
    str, typer.Argument(help="name@v3, name@v2.3.1, name@tag, a name (its last version), or an artifact's id.")
]

ColumnOption = Annotated[
    list[str] | None,
    typer.Option("--column", help="Which column holds what, NAME=COLUMN such as prompt=question; repeatable."),
]

_WIDTH = 60


def columns_with(columns: Mapping[str, str] | None, given: Sequence[str] | None) -> dict[str, str] | None:
    """``data.columns`` of the config with what ``--column`` says over it.

    Raises:
        UserError: an option is not ``NAME=COLUMN``, or its name is none that a column can have.
    """
    from posttrain.data.reading.shapes import TARGETS

    found = dict(columns or {})
    for one in given or ():
        target, equals, column = one.partition("=")
        if not equals or not column or target not in TARGETS:
            fix = f"NAME=COLUMN, where NAME is one of {', '.join(TARGETS)}"
            raise UserError(f"`{one}` names no column", where="--column", fix=fix)
        found[target] = column
    return found or None


def say_unused(files: "Sequence[Place]", root: Path, columns: Mapping[str, str] | None) -> None:
    """One line on standard error for each set of columns that files have and records are not made of."""
    from posttrain.data.reading.paths import shown
    from posttrain.data.reading.unused_columns import note, unused_columns

    names: dict[tuple[str, ...], list[str]] = {}
    for file in files:
        name = shown(file, root)
        if unused := unused_columns(file, name, columns):
            names.setdefault(tuple(unused), []).append(name)
    for columns_of, found in names.items():
        more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
        errors.print(note(found[0] + more, list(columns_of), columns), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def opened_store(root: Path, *, write: bool = False) -> Iterator[Workspace]:
    """The workspace in ``root``, which needs no ``posttrain.yaml`` for its datasets; closed at the end."""
    config = StoreConfig()
    if (root / CONFIG_FILE).is_file():
        from posttrain.loop.config import read_config

        config = read_config(root).store
    if not write and not (root / ".posttrain" / "format.json").exists():
        raise UserError("nothing is stored here yet", where=str(root), fix="posttrain data add FILE --name NAME")
    with Workspace.create(root, config) if write else Workspace.open(root, config, write=False) as workspace:
        yield workspace


def stored_version(store: Workspace, text: str) -> "Version":
    """The version that a name, ``name@vN`` or an id says.

    Raises:
        UserError: there is none.
    """
    from posttrain.data.versions.stored_version import Version

    id = store.metadata.named(text)
    if id is None:
        try:
            id = store.metadata.resolve(text)
        except UserError as error:
            unknown = error.what.startswith("nothing here")
            raise UserError(error.what, fix="posttrain data list" if unknown else error.fix) from None
    row = store.metadata.artifact(id)
    if row is None or row.kind != "dataset":
        raise UserError(f"`{text}` is no dataset version", fix="posttrain data list")
    return Version.open(store.artifacts, id)


def print_records(title: str, records: list[dict[str, Any]]) -> None:
    """A table of rows of RECORD."""
    rows = [[one["id"], shown_input(one), one["completion"], one["source"], one["line"]] for one in records]
    print_table(title, ["id", "input", "answer", "file", "line"], rows)


def print_rejections(title: str, records: list[dict[str, Any]]) -> None:
    """A table of rows of REJECTED."""
    rows = [[one["id"], shown_input(one), one["step"], one["reason"], one["detail"]] for one in records]
    print_table(title, ["id", "input", "step", "reason", "detail"], rows)


def shown_input(record: dict[str, Any]) -> str:
    """The record's input on one line of at most 60 characters."""
    words = record["text"] or " / ".join(turn["content"] for turn in record["prompt"] or [])
    words = " ".join(words[: 4 * _WIDTH].split())
    return words if len(words) <= _WIDTH else words[: _WIDTH - 1] + "…"
