"""The loop in Python: `posttrain.Workspace`, as the verbs of the command line are it in a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.loop.config import Config, open_workspace
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace


@contextmanager
def argument_names() -> Iterator[None]:
    """Names arguments in errors where the command line names options: ``until`` in place of ``--until``."""
    try:
        yield
    except UserError as error:
        if not (error.where or "").startswith("--"):
            raise
        raise UserError(error.what, where=str(error.where).removeprefix("--"), fix=error.fix) from error.__cause__


@contextmanager
def open_call(path: Path, *, write: bool = False, checked: bool = True) -> Iterator[tuple[Workspace, Config]]:
    """Opens a workspace for one call, as `posttrain.loop.config.open_workspace`; errors name arguments."""
    with argument_names(), open_workspace(path, write=write, checked=checked) as opened:
        yield opened
