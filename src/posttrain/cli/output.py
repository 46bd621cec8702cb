"""Console, JSON, tables and log lines: how every verb prints."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from posttrain.store.errors import shorten, to_line
from posttrain.store.logs import mask_secrets, quiet_libraries
from posttrain.store.secrets import mask_text
from posttrain.store.text_files import finite_json

# No emoji codes: a path such as `module:Name: message` would show a picture.
console = Console(emoji=False)

error_console = Console(stderr=True, emoji=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

MAX_LINE = 5_000
"""Characters of an error's line; a path alone may have 4,096."""

_FILE_WIDTH = 1_000_000
"""Characters in a line of a table that goes to a file or a pipe, which wraps nothing."""

RECORD_COLUMNS = ("label", "input", "record", "line")

_LINE_WIDTH = 60

_PREVIEW_WIDTH = 60


def print_line(text: str) -> None:
    """Prints a text as it is."""
    # Brackets in a record are not markup, and a path that is broken over lines cannot be copied.
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_error(error: Exception) -> None:
    """Prints an error's line to standard error, as the end of a command does."""
    line = shorten(mask_text(to_line(str(error)[: 2 * MAX_LINE])), MAX_LINE)
    print_error_text(f"posttrain: {line}")


def print_error_text(text: str, style: str | None = "red") -> None:
    """Prints a text to standard error as it is."""
    # A standard error that takes nothing leaves the exit code to tell.
    with suppress(OSError):
        error_console.print(text, markup=False, highlight=False, style=style, soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints JSON and nothing else; NaN and infinity become null."""
    # JSON has no word for them, and Python's own `NaN` breaks other parsers.
    typer.echo(json.dumps(finite_json(value), indent=2, ensure_ascii=False, default=str, allow_nan=False))


def print_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Prints a table with numbers to the right; folds long cells only on a terminal."""
    table = Table(title=title or None, title_justify="left", header_style="bold", box=None, pad_edge=False)
    numeric = [
        bool(rows) and all(isinstance(row[at], int | float | None) for row in rows) for at in range(len(columns))
    ]
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell_text, row))
    if console.is_terminal:
        console.print(table, markup=False)
    else:
        # A new console, as the width of the other is that of a terminal: a cell in a pipe must stay on its line.
        Console(width=_FILE_WIDTH, emoji=False).print(table, markup=False)


def _cell_text(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def setup_logging(debug: bool) -> None:
    """Sends the program's log lines to standard error, and silences other libraries unless something is wrong."""
    quiet_libraries()
    handler: logging.Handler = logging.StreamHandler()
    if error_console.is_terminal:
        handler = RichHandler(
            console=error_console, show_time=False, show_level=False, show_path=False, markup=False, highlighter=None
        )
    handler.addFilter(mask_secrets)
    logger = logging.getLogger("posttrain")
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    # Libraries that configure the root logger would print every line twice.
    logger.propagate = False


class _EventFormatter(logging.Formatter):
    """Puts the time before a line, without the indent that it has below its round's."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.strip()
        return super().formatMessage(record)


@contextmanager
def print_events() -> Iterator[None]:
    """Prints, with their times, only the log lines of events and those that say that something is wrong."""
    logger = logging.getLogger("posttrain")
    handler = logger.handlers[0]

    def select(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or getattr(record, "event", False)

    before = handler.formatter
    handler.addFilter(select)
    handler.setFormatter(_EventFormatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M"))
    try:
        yield
    finally:
        handler.removeFilter(select)
        handler.setFormatter(before)


def record_cells(record: dict[str, Any]) -> list[Any]:
    """Returns a labelled record's cells under `RECORD_COLUMNS`."""
    return [record["label"], one_line(record["input"]), record["id"], f"{record['source']}:{record['line']}"]


def one_line(text: str) -> str:
    """Puts a text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _LINE_WIDTH else line[: _LINE_WIDTH - 1] + "…"


def print_records(title: str, records: list[dict[str, Any]]) -> None:
    """Prints a table of RECORD rows."""
    rows = [
        [record["id"], input_preview(record), record["completion"], record["source"], record["line"]]
        for record in records
    ]
    print_table(title, ["id", "input", "answer", "file", "line"], rows)


def print_rejections(title: str, records: list[dict[str, Any]]) -> None:
    """Prints a table of REJECTED rows."""
    rows = [
        [record["id"], input_preview(record), record["step"], record["reason"], record["detail"]] for record in records
    ]
    print_table(title, ["id", "input", "step", "reason", "detail"], rows)


def input_preview(record: dict[str, Any]) -> str:
    """Returns the record's input on one line of at most 60 characters."""
    preview = record["text"] or " / ".join(turn["content"] for turn in record["prompt"] or [])
    # Cut before it is split: a record may be a whole book.
    preview = " ".join(preview[: 4 * _PREVIEW_WIDTH].split())
    return preview if len(preview) <= _PREVIEW_WIDTH else preview[: _PREVIEW_WIDTH - 1] + "…"
