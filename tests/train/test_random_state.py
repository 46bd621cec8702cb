"""A resumed training draws the same random numbers as an uninterrupted one, from every library."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.format import Checkpoint
from posttrain.train.state import random_state, set_random_state

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),  # every second number is computed ahead
    "numpy": lambda: float(np.random.random()),
    "numpy, normal": lambda: float(np.random.standard_normal()),
    "torch": lambda: float(torch.rand(())),
    "torch, normal": lambda: float(torch.randn(())),
}


@pytest.fixture(autouse=True)
def _restore_the_generators() -> Iterator[None]:
    """Other tests use these generators too."""
    before = random_state()
    yield
    set_random_state(before)


@pytest.mark.parametrize("skipped", [0, 1, 700])
@pytest.mark.parametrize("name", DRAWS)
def test_each_generator_resumes(tmp_path: Path, name: str, skipped: int) -> None:
    """Through a checkpoint on the disk, also in the middle of a pair of normal numbers or of a generator's block."""
    draw = DRAWS[name]
    for _ in range(skipped):
        draw()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, Checkpoint(random_state(), {}))
    expected = [draw() for _ in range(5)]
    assert [draw() for _ in range(5)] != expected
    actual = checkpoints.latest()
    assert actual is not None
    set_random_state(actual.tensors)
    assert [draw() for _ in range(5)] == expected


def test_random_state_draws_nothing() -> None:
    before = random_state()
    after = random_state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_number_of_devices_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    state = random_state()
    set_random_state(state)
    assert caplog.messages == []
    count = sum(name.startswith("random.cuda.") for name in state)
    set_random_state(state | {f"random.cuda.{count}": torch.get_rng_state()})
    assert len(caplog.messages) == 1
    assert f"the checkpoint is of {count + 1} CUDA devices, here are {count}" in caplog.text
