"""Checkpoints to save and compare, and processes that are killed while saving them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from saver import Request, act
from saver import make as make_checkpoint

from faults import Process, start
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint


@pytest.fixture
def make() -> Callable[..., Checkpoint]:
    """``make(step, version)``: the checkpoint of a step."""
    return make_checkpoint


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


@pytest.fixture
def start_saver(tmp_path: Path, folder: Path) -> Callable[..., Process]:
    """``start_saver([["save", 1, 0]], kill_at=3)``: starts a process that does so; see `saver.Request`."""

    def start_saver(actions: list[list[Any]], **options: Any) -> Process:
        return start(partial(act, replace(Request(str(folder), str(tmp_path / "trace"), actions), **options)))

    return start_saver
