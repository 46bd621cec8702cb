"""What the config names beside itself, looked at before any work."""

from pathlib import Path

from posttrain.data.reading.tables import read
from posttrain.evaluate.scorers.python_function import load_function
from posttrain.loop.config import Config
from posttrain.store.errors import UserError


def check_suites(config: Config, root: Path) -> None:
    """Find out before any work whether every suite's records can be read and its function be imported.

    Modules are looked for in the workspace's folder too, here and in the work that follows.

    Args:
        config: the workspace's config.
        root: the workspace's folder.

    Raises:
        UserError: if not, with the suite's key, or the file and line.
    """
    for name, suite in config.evaluate.suites.items():
        where = f"evaluate.suites.{name}"
        if suite.function:
            load_function(suite.function, f"{where}.function", root)
        if suite.data == "test":
            continue
        path = root / Path(suite.data).expanduser()
        if not path.exists():
            raise UserError(f"no such file: {suite.data}", where=f"{where}.data", fix="check the path")
        for _ in read(path, suite.columns or config.data.columns, name=suite.data):
            pass  # reading finds a bad record
