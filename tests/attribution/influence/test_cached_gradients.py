"""Projected gradients in a folder: finished blocks are not computed again, even after a kill or a damaged file."""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.gradients import projected_gradients, record_gradients
from posttrain.attribution.influence.losses import CrossEntropy
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.influence.tracin import AdamMoments
from posttrain.store.errors import UserError

SCRIPT = '''
"""Computes the gradients of 12 records, logs each forward pass in a file, and sleeps in block 3 with `stop`.

With `slow` two processes do the work.
"""
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from posttrain.attribution.influence.gradients import projected_gradients
from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.losses import CrossEntropy
from posttrain.attribution.influence.projection import Projection

child = os.fork() if sys.argv[3] == "slow" else 0
folder, counter, pause = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = nn.Linear(4, 3).double()
records = [(torch.randn(4, dtype=torch.float64), torch.tensor(row % 3)) for row in range(12)]
passes = 0

def run(model, batch):
    global passes
    passes += 1
    if pause == "stop" and passes == 9:
        time.sleep(600)
    if pause == "slow":
        time.sleep(0.05)
    with counter.open("a") as file:
        file.write("x")
    return model(batch[0])

functional = FunctionalModel(model, run, CrossEntropy())
result = projected_gradients(functional, records, Projection(8), folder=folder, block_size=4, mode="loop")
print(result.evaluations, repr(result.rows.sum().item()), flush=True)
if child:
    os.wait()
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "work.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def run_here(monkeypatch, capsys) -> Callable[..., list[str]]:
    """Runs the script to its end in this process; returns the words it prints."""

    def run(*arguments: Path) -> list[str]:
        monkeypatch.setattr(sys, "argv", [*map(str, arguments), ""])
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(
                str(arguments[0]), run_name="__main__"
            )  # under this name, its functions have the same cache keys
        return capsys.readouterr().out.split()

    return run


def start(script: Path, folder: Path, counter: Path, pause: str) -> subprocess.Popen:
    command = [sys.executable, str(script), str(folder), str(counter), pause]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_pass_resumes_without_computing_a_finished_block_again(script, tmp_path, run_here) -> None:
    folder, counter = tmp_path / "cache", tmp_path / "counter"
    killed = start(script, folder, counter, "stop")
    deadline = time.monotonic() + 240
    while not counter.exists() or len(counter.read_text()) < 8:  # it sleeps within its third block
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while len(list(folder.glob("*.block"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    killed.stdout.close()
    assert len(list(folder.glob("*.block"))) == 2
    evaluations, total = run_here(script, folder, counter)
    assert len(counter.read_text()) == 12
    assert evaluations == "4"
    assert run_here(script, tmp_path / "fresh", tmp_path / "other") == ["12", total]
    assert sorted(file.suffix for file in folder.iterdir()) == [".block"] * 3


@pytest.mark.slow
def test_processes_share_the_blocks(script, tmp_path) -> None:
    folder, counter = tmp_path / "cache", tmp_path / "counter"
    outputs = [line.split() for line in start(script, folder, counter, "slow").communicate()[0].splitlines()]
    assert len(outputs) == 2
    assert len(counter.read_text()) == 12
    assert sum(int(evaluations) for evaluations, _ in outputs) == 12
    assert outputs[0][1] == outputs[1][1]


def test_cached_gradients_equal_computed_ones(network, tmp_path) -> None:
    projection = Projection(6)
    plain = projected_gradients(network.model, network.train, projection, block_size=8)
    expected = projection(torch.cat([result for _, result in record_gradients(network.model, network.train)]))
    torch.testing.assert_close(plain.rows, expected)
    first, second = (
        projected_gradients(network.model, network.train, projection, folder=tmp_path / "new" / "cache", block_size=8)
        for _ in range(2)
    )
    assert torch.equal(first.rows, plain.rows)
    assert torch.equal(second.rows, plain.rows)
    assert (plain.evaluations, first.evaluations, second.evaluations) == (20, 20, 0)


def test_the_cache_key_has_everything_that_gradients_depend_on(network, tmp_path) -> None:
    def evaluations(model: FunctionalModel = network.model, records: list | None = None, **settings) -> int:
        settings = {"projection": Projection(6), "block_size": 5} | settings
        return projected_gradients(model, records or network.train, folder=tmp_path, **settings).evaluations

    assert evaluations() == 20
    assert evaluations() == 0
    assert evaluations(records=[*network.train[:7], network.train[8], *network.train[8:]]) == 5  # one block changed
    assert evaluations(records=network.train[:7]) == 2
    assert evaluations(projection=Projection(7)) == 20
    assert evaluations(projection=Projection(6, 1)) == 20
    assert evaluations(projection=Projection(6, 0, "dense")) == 20
    assert evaluations(projection=None) == 20
    zeros = torch.zeros(network.model.size, dtype=torch.float64)
    assert evaluations(transform=AdamMoments(zeros, zeros, 1)) == 20
    assert evaluations(transform=AdamMoments(zeros, zeros, 2)) == 20
    changed = {name: value + 1e-9 for name, value in network.model.parameters.items()}
    assert evaluations(network.model.at(changed)) == 20
    other = FunctionalModel(network.model.module, lambda model, batch: 2 * model(batch[0]), CrossEntropy())
    assert evaluations(other) == 20
    network.model.module[1].register_buffer("unused", torch.zeros(1))
    buffered = FunctionalModel(network.model.module, network.model.outputs, CrossEntropy())
    assert evaluations(buffered) == 20
    assert evaluations() == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_block_is_named_and_computed_again(network, tmp_path, caplog, damage) -> None:
    first = projected_gradients(network.model, network.train, folder=tmp_path, block_size=10)
    file = sorted(tmp_path.glob("*.block"))[0]
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes({"flip": content, "cut": content[:100], "empty": b""}[damage])
    again = projected_gradients(network.model, network.train, folder=tmp_path, block_size=10)
    assert f"{file} is damaged" in caplog.text
    assert again.evaluations == 10
    assert torch.equal(again.rows, first.rows)
    assert projected_gradients(network.model, network.train, folder=tmp_path, block_size=10).evaluations == 0


def test_the_lock_of_a_process_killed_after_writing_its_block_is_removed(network, tmp_path) -> None:
    projected_gradients(network.model, network.train, folder=tmp_path, block_size=10)
    for file in list(tmp_path.glob("*.block")):
        file.with_suffix(".lock").touch()
    assert projected_gradients(network.model, network.train, folder=tmp_path, block_size=10).evaluations == 0
    assert {file.suffix for file in tmp_path.iterdir()} == {".block"}


def test_gradients_are_transformed_before_they_are_projected(network) -> None:
    class Absolute:
        key = "absolute"

        def __call__(self, gradients: torch.Tensor) -> torch.Tensor:
            return gradients.abs()

    raw = torch.cat([result for _, result in record_gradients(network.model, network.train)])
    result = projected_gradients(network.model, network.train, Projection(6), transform=Absolute())
    torch.testing.assert_close(result.rows, Projection(6)(raw.abs()))


def test_unusable_records_folders_and_gradients_are_refused(network, tmp_path) -> None:
    with pytest.raises(UserError, match="no records"):
        projected_gradients(network.model, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file has the folder's path"):
        projected_gradients(network.model, network.train, folder=tmp_path / "file")
    model = nn.Linear(4, 3).double()
    model.weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match="record 0: the gradient of its loss is not finite"):
        projected_gradients(FunctionalModel(model, network.model.outputs, CrossEntropy()), network.train)
