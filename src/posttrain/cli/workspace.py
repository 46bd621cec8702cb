"""Opens a workspace, its store or a dataset version for a verb; the options that name them."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.output import error_console
from posttrain.store.config import CONFIG_FILE, StoreConfig
from posttrain.store.errors import UserError

if TYPE_CHECKING:
    from posttrain.data.reading.data_files import DataPath
    from posttrain.data.versions.version import Version
    from posttrain.loop.config import Config
    from posttrain.store.workspace import Workspace

WorkspaceOption = Annotated[Path, typer.Option("--workspace", "-w", help="The workspace's folder.")]

CURRENT_FOLDER = Path(".")

VersionArgument = Annotated[
    str, typer.Argument(help="name@v3, name@v2.3.1, name@tag, a name (its last version), or an artifact's id.")
]

ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column", help="Column that a field is read from, FIELD=COLUMN such as prompt=question; repeatable."
    ),
]


def open_workspace(
    root: Path, *, write: bool = False, checked: bool = True
) -> "AbstractContextManager[tuple[Workspace, Config]]":
    """Opens a workspace as `posttrain.loop.config.open_workspace`."""
    # Here, since verbs without a workspace must not wait for the whole config to be imported.
    from posttrain.loop.config import open_workspace

    return open_workspace(root, write=write, checked=checked)


def workspace_option(root: Path) -> str:
    """Returns the option by which a command names a workspace; "" for the current folder's."""
    return "" if root == CURRENT_FOLDER else f"-w {shlex.quote(str(root))}"


def waiting_text(waiting: str, root: Path) -> str:
    """Says what the loop waits for, with files and commands as they are named from the current folder."""
    if root != CURRENT_FOLDER:
        waiting = re.sub(r"\blabels/(?=[\w-]+\.csv)", lambda match: f"{root / match[0]}/", waiting)
        for command in ("posttrain label serve", "posttrain run --partial"):
            waiting = waiting.replace(command, f"{command} {workspace_option(root)}")
    return f"waiting for {waiting}"


def merge_columns(columns: Mapping[str, str] | None, options: Sequence[str] | None) -> dict[str, str] | None:
    """Merges ``--column`` options over ``data.columns`` of the config.

    Raises:
        UserError: an option is not ``NAME=COLUMN``, or its name is none that a column can have.
    """
    from posttrain.data.reading.conversion import TARGETS

    merged = dict(columns or {})
    for option in options or ():
        target, equals, column = option.partition("=")
        if not equals or not column or target not in TARGETS:
            fix = f"NAME=COLUMN, where NAME is one of {', '.join(TARGETS)}"
            raise UserError(f"`{option}` names no column", where="--column", fix=fix)
        merged[target] = column
    return merged or None


def report_unused_columns(files: "Sequence[DataPath]", root: Path, columns: Mapping[str, str] | None) -> None:
    """Prints a line for each set of columns in the files that no record uses."""
    from posttrain.data.reading.data_files import display_path
    from posttrain.data.reading.reader import unused_columns, unused_columns_note

    names: dict[tuple[str, ...], list[str]] = {}
    for file in files:
        name = display_path(file, root)
        if unused := unused_columns(file, name, columns):
            names.setdefault(tuple(unused), []).append(name)
    for columns_of, file_names in names.items():
        more = f" and {len(file_names) - 1:,} more" if len(file_names) > 1 else ""
        note = unused_columns_note(file_names[0] + more, list(columns_of), columns)
        error_console.print(note, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def store_config(root: Path) -> Iterator[StoreConfig]:
    """Yields the config of the store in ``root``, which needs no ``posttrain.yaml``; errors name the config's line."""
    if not (root / CONFIG_FILE).is_file():
        yield StoreConfig()
        return
    from posttrain.loop.config import config_lines, read_config

    with config_lines(root):
        yield read_config(root).store


@contextmanager
def open_store(root: Path, *, write: bool = False) -> "Iterator[Workspace]":
    """Opens the store in ``root``, which needs no ``posttrain.yaml`` for its datasets, and closes it at the end."""
    from posttrain.store.workspace import Workspace

    with store_config(root) as config:
        if not write and not (root / ".posttrain" / "format.json").exists():
            raise UserError("nothing is stored here yet", where=str(root), fix="posttrain data add FILE --name NAME")
        workspace = Workspace.create(root, config) if write else Workspace.open(root, config, write=False)
    with workspace:
        yield workspace


def open_version(store: "Workspace", text: str) -> "Version":
    """Opens the version named by a name, ``name@vN`` or an id.

    Raises:
        UserError: there is none.
    """
    from posttrain.data.versions.version import Version

    id = store.metadata.named(text)
    if id is None:
        try:
            id = store.metadata.resolve(text)
        except UserError as error:
            # An ambiguous id has a better fix of its own.
            unknown = error.what.startswith("nothing here")
            raise UserError(error.what, fix="posttrain data list" if unknown else error.fix) from None
    row = store.metadata.artifact(id)
    if row is None or row.kind != "dataset":
        raise UserError(f"`{text}` is not a dataset version", fix="posttrain data list")
    return Version.open(store.artifacts, id)
