"""Checkpoints to save and compare, and processes that are killed while saving them."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint

_SAVER = Path(__file__).with_name("saver.py")


def _load_saver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("posttrain_test_saver", _SAVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


saver = _load_saver()


@pytest.fixture
def make() -> Callable[..., Checkpoint]:
    """``make(step, version)``: the checkpoint of a step."""
    return saver.make


@pytest.fixture
def same() -> Callable[[Checkpoint | None, Checkpoint], bool]:
    """Compares two checkpoints bit for bit, including names, dtypes and shapes."""

    def same(actual: Checkpoint | None, expected: Checkpoint) -> bool:
        if actual is None or (actual.state, actual.steps) != (expected.state, expected.steps):
            return False
        if list(actual.tensors) != list(expected.tensors):
            return False
        return all(_bits(actual.tensors[name]) == _bits(tensor) for name, tensor in expected.tensors.items())

    return same


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def foreground(folder: Path) -> Checkpoints:
    """Checkpoints that are written before ``save`` returns; keeps the last two."""
    return Checkpoints(folder, CheckpointConfig(background=False))


@pytest.fixture
def two_checkpoints(foreground: Checkpoints, make: Callable[..., Checkpoint]) -> Checkpoints:
    """Checkpoints of steps 3 and 4."""
    for step in (3, 4):
        foreground.save(step, make(step))
    return foreground


@pytest.fixture
def background(folder: Path) -> Iterator[Callable[..., Checkpoints]]:
    """``background(keep_last=9)``: checkpoints written in the background, closed after the test."""
    checkpoints_list = []

    def open_checkpoints(**config: Any) -> Checkpoints:
        checkpoints_list.append(Checkpoints(folder, CheckpointConfig(**config)))
        return checkpoints_list[-1]

    yield open_checkpoints
    for checkpoints in checkpoints_list:
        checkpoints.close()


class Savers:
    """Processes that save checkpoints, forked from a process that has imported everything."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.killed = -signal.SIGKILL

    def start(self, *requests: Any) -> list[int]:
        """Start them; returns their ids. ``wait`` must follow."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([asdict(request) for request in requests]) + "\n")
        self.process.stdin.flush()
        ids: list[int] = self._answer()
        return ids

    def wait(self) -> list[int]:
        """Their exit codes, once all have ended."""
        codes: list[int] = self._answer()
        return codes

    def run(self, *requests: Any) -> list[int]:
        self.start(*requests)
        return self.wait()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="session")
def savers() -> Iterator[Savers]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(_SAVER)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield Savers(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def request_of(tmp_path: Path, folder: Path) -> Callable[..., Any]:
    """``request_of([["save", 1, 0]], kill_at=3)``: a request for `Savers`."""

    def request_of(actions: list[list[Any]], **options: Any) -> Any:
        request = saver.Request(str(folder), str(tmp_path / "trace"), actions)
        return replace(request, **options)

    return request_of
