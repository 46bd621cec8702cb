"""The command line, called in this process, and workspaces for it."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.cli.main import main


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No waiting for the disk, no threads for a tiny model, and the log as it was afterwards."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    torch.set_num_threads(1)
    logger = logging.getLogger("posttrain")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        def refuse(name: str) -> None:
            raise ValueError(f"{name} is no JSON")

        return json.loads(self.out, parse_constant=refuse)

    @property
    def mistake(self) -> str:
        """The one line that a user's mistake ends in, after the program's name."""
        assert self.code == 2, self
        assert self.out == "", self
        assert self.err.endswith("\n"), self
        assert self.err.count("\n") == 1, self
        assert "Traceback" not in self.err
        assert self.err.startswith("posttrain: "), self
        return self.err.removeprefix("posttrain: ").removesuffix("\n")


Call = Callable[..., Outcome]


@pytest.fixture
def posttrain(capfd: pytest.CaptureFixture[str]) -> Call:
    """``posttrain("run", "-w", folder)``."""

    def call(*arguments: str | Path) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        assert isinstance(left.value.code, int)
        return Outcome(left.value.code, printed.out, printed.err)

    return call


@pytest.fixture(scope="session")
def finished_workspace(small_anywhere: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace after two rounds; copy it to write to it."""
    root: Path = small_anywhere(tmp_path_factory.mktemp("cli"))()
    with pytest.raises(SystemExit, match="0"):
        main(["run", "-w", str(root)])
    return root


Tree = Callable[[Path], dict[str, str]]


@pytest.fixture(scope="session")
def tree() -> Tree:
    """``tree(folder)``: every file and link with its content, but for the database and the lock."""

    def found_in(root: Path) -> dict[str, str]:
        result = {}
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_symlink():
                result[name] = f"-> {os.readlink(path)}"
            elif path.is_file() and not name.startswith((".posttrain/store.db", ".posttrain/lock")):
                result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return result

    return found_in
