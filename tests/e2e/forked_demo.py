"""What a process does that is forked to be killed; in a module of its own, as such a process has to find it by name."""

import os
from pathlib import Path

from posttrain.cli.main import main


def run(folder: Path, log: Path) -> None:
    """``posttrain demo --quick --dir FOLDER``, its output added to a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(["demo", "--quick", "--dir", str(folder)])
