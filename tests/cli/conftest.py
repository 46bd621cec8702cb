"""Calls of the command line in this process, and workspaces for them."""

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
from text_models import specialists, text_workspace

from posttrain.cli.main import main

__all__ = ["specialists", "text_workspace"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skips fsync, uses one thread, and restores the logger afterwards."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    torch.set_num_threads(1)
    logger = logging.getLogger("posttrain")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@dataclass(frozen=True)
class Outcome:
    """The result of a command: its exit code and its output."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        def refuse(name: str) -> None:
            raise ValueError(f"{name} is not JSON")

        return json.loads(self.out, parse_constant=refuse)

    @property
    def mistake(self) -> str:
        """The one line of output after a user's mistake, without the program's name."""
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
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        assert isinstance(exit_info.value.code, int)
        return Outcome(exit_info.value.code, captured.out, captured.err)

    return call


Tree = Callable[[Path], dict[str, str]]


@pytest.fixture(scope="session")
def tree() -> Tree:
    """``tree(folder)``: every file and link with its digest, except the database with its journal and the lock."""

    def digests(root: Path) -> dict[str, str]:
        result = {}
        changing = tuple(f".posttrain/{name}" for name in ("store.db", "journal.jsonl", "lock"))
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_symlink():
                result[name] = f"-> {os.readlink(path)}"
            elif path.is_file() and not name.startswith(changing):
                result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return result

    return digests
