"""What the verbs share: the workspace option, output as text or JSON, log lines."""

import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from posttrain.store.errors import UserError

if TYPE_CHECKING:
    from posttrain.loop.config import Config
    from posttrain.store.workspace import Workspace

console = Console()
errors = Console(stderr=True)

WorkspaceOption = Annotated[Path, typer.Option("--workspace", "-w", help="The workspace's folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
HERE = Path(".")

_WIDEST = 1_000_000


@contextmanager
def opened(root: Path, *, write: bool = False, checked: bool = True) -> Iterator["tuple[Workspace, Config]"]:
    """The workspace in ``root`` and its config; closed at the end.

    Args:
        checked: False for verbs that need nothing of what the config names: they work where that is gone.
    """
    from posttrain.loop.config import load_config, read_config
    from posttrain.store.workspace import Workspace

    config = load_config(root) if checked else read_config(root)
    # A folder with a config is a workspace: whoever writes makes the store at the first run.
    if not write and not (root / ".posttrain" / "format.json").exists():
        raise UserError("nothing has run here yet", where=str(root), fix=f"posttrain run -w {root}")
    with (
        Workspace.create(root, config.store) if write else Workspace.open(root, config.store, write=False) as workspace
    ):
        yield workspace, config


def print_json(value: Any) -> None:
    """JSON on standard output, and nothing else; numbers that JSON has no word for (NaN, infinity) are null."""
    typer.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """A table on standard output; numbers to the right. Only for a terminal are long words broken."""
    table = Table(title=title or None, title_justify="left", header_style="bold", box=None, pad_edge=False)
    numeric = [
        bool(rows) and all(isinstance(row[at], int | float | None) for row in rows) for at in range(len(columns))
    ]
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(
            *["" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value) for value in row]
        )
    if console.is_terminal:
        console.print(table, markup=False)
    else:  # nobody knows how wide a file or another program is
        Console(width=_WIDEST).print(table, markup=False)


def setup_logging(debug: bool) -> None:
    """Log lines of the program on standard error; other libraries speak up only when something is wrong."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not errors.is_terminal:
        os.environ.setdefault("TQDM_DISABLE", "1")
    handler: logging.Handler = logging.StreamHandler()
    if errors.is_terminal:
        handler = RichHandler(
            console=errors, show_time=False, show_level=False, show_path=False, markup=False, highlighter=None
        )
    logger = logging.getLogger("posttrain")
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False
    # torchao says at import which of its GPU kernels do not load on a CPU, and torch what torchao will have to change.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
