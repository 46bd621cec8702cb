"""A training that is killed, at any time and any number of times, has the same output."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.task import TaskConfig
from posttrain.train import trainer
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.format import Checkpoint
from posttrain.train.config import TrainConfig
from posttrain.train.lora_config import LoraConfig
from posttrain.train.monitor.decisions import POLICIES
from posttrain.train.monitor.metrics import JsonlSink
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.stage import train
from posttrain.train.trainer import StepResult

pytestmark = pytest.mark.slow

LORA = {"method": "lora", "lora": LoraConfig(rank=4, dropout=0.3)}
METHODS = {
    "float32": {"precision": "float32"},
    "autocast": {"precision": "autocast"},
    "lora-bfloat16": LORA | {"precision": "bfloat16"},
}
TASK = TaskConfig(system="Name the intent.")
TIMES = ("seconds", "tokens_per_second", "memory_bytes", "data_wait", "data_rate", "mfu", "phases")


class Killed(BaseException):
    """Stands for the death of the process."""


@pytest.fixture
def config(checkpointed: TrainConfig) -> TrainConfig:
    return checkpointed


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def kill_after_saves(steps: int, work: Callable[[], object]) -> None:
    """Runs ``work`` in a process that dies in the first forward pass after ``steps`` checkpoints."""
    saves = 0
    save, loss = Checkpoints.save, SftObjective.loss

    def count_saves(self: Checkpoints, step: int, checkpoint: Checkpoint) -> None:
        nonlocal saves
        save(self, step, checkpoint)
        saves += 1

    def die(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        if saves == steps:
            raise Killed
        return loss(self, lm, packed, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", count_saves)
        patch.setattr(SftObjective, "loss", die)
        with pytest.raises(Killed):
            work()


@pytest.mark.parametrize(
    "method",
    ["lora-bfloat16", *(pytest.param(name, marks=pytest.mark.long) for name in ("float32", "autocast"))],
)
def test_repeated_kills_do_not_change_the_output(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, method: str
) -> None:
    config = config.model_copy(update=METHODS[method])
    expected_out, out = tmp_path / "whole", tmp_path / "parts"
    meta = train(tiny_model, records, config, TASK, seed=3, out=expected_out, scratch=tmp_path / "a")
    steps = meta["steps"]
    assert steps == 6

    def run() -> dict[str, Any]:
        torch.manual_seed(99)  # a new process has other generator states
        return train(tiny_model, records, config, TASK, seed=3, out=out, scratch=tmp_path / "b")

    for saves in (1, 2, 1):  # the second process ends an epoch
        kill_after_saves(saves, run)
    assert run() == meta
    assert contents(out) == contents(expected_out)


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    """The output of the training that nobody kills, once the first test has needed it."""
    return {}


@pytest.fixture
def train_as(tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path) -> Callable[[str], Any]:
    """``train_as(name)``: trains, or resumes; returns the summary and the files."""

    def run(name: str) -> Any:
        summary = train(tiny_model, records, config, TASK, seed=3, out=tmp_path / name, scratch=tmp_path / f"{name}-s")
        return summary, contents(tmp_path / name)

    return run


@pytest.fixture
def whole(train_as: Callable[[str], Any], shared: dict[str, Any]) -> Any:
    """Summary and files of the training that nobody kills."""
    if not shared:
        shared["whole"] = train_as("whole")
    return shared["whole"]


@pytest.fixture
def killed(train_as: Callable[[str], Any], tmp_path: Path) -> Callable[..., Any]:
    """``killed(saves, change)``: kills a training, changes its folder and resumes it; returns summary and files."""

    def kill_and_resume(saves: int, change: Callable[[Path], object] | None = None) -> Any:
        kill_after_saves(saves, lambda: train_as("parts"))
        if change is not None:
            change(tmp_path / "parts-s")
        return train_as("parts")

    return kill_and_resume


@pytest.mark.parametrize("step", [0, 3, 5])
def test_a_single_kill_does_not_change_the_output(killed: Callable[..., Any], whole: Any, step: int) -> None:
    assert killed(step) == whole


def test_finished_steps_are_not_repeated(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> dict[str, Any]:
        return train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "out", scratch=tmp_path / "s")

    kill_after_saves(4, run)
    passes = 0
    loss = SftObjective.loss

    def count_passes(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal passes
        passes += 1
        return loss(self, lm, packed, rows)

    monkeypatch.setattr(SftObjective, "loss", count_passes)
    run()
    assert passes == 2


def test_a_damaged_checkpoint_only_costs_steps(
    killed: Callable[..., Any], whole: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def damage(scratch: Path) -> None:
        file = scratch / "checkpoints" / "step-000000004" / "tensors.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    assert killed(4, damage) == whole
    assert "step-000000004 is damaged (tensors.safetensors does not match its checksums in `" in caplog.text


@pytest.fixture
def train_into_file(tiny_model: Path, records: pa.Table, tmp_path: Path) -> Callable[[str, TrainConfig], None]:
    """``train_into_file(name, config)``: trains, with a line for each step in the file ``name.jsonl``."""

    def run(name: str, config: TrainConfig) -> None:
        sink = JsonlSink(tmp_path / f"{name}.jsonl")
        out, scratch = tmp_path / f"{name}-out", tmp_path / name
        try:
            train(tiny_model, records, config, TASK, seed=3, out=out, scratch=scratch, sink=sink)
        finally:
            sink.close()

    return run


def read_lines(file: Path, excluded: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    result = map(json.loads, file.read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in excluded} for line in result]


def test_the_metrics_file_of_a_killed_training_is_complete(
    config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train_into_file: Callable[[str, TrainConfig], None],
) -> None:
    """No step is repeated or missing, and steps that are not repeated keep their measured values."""
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 2})})

    expected_file, actual_file = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    train_into_file("whole", config)
    loss = SftObjective.loss
    for checkpointed in (2, 4):
        passes = 0

        def die(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
            nonlocal passes
            passes += 1
            if passes == 4:  # one step after the checkpoint
                raise Killed
            return loss(self, lm, packed, rows)

        with monkeypatch.context() as patch:
            patch.setattr(SftObjective, "loss", die)
            with pytest.raises(Killed):
                train_into_file("parts", config)
        before = read_lines(actual_file)
        assert [line["step"] for line in before] == list(range(checkpointed + 1))
        checkpoint = Checkpoints(tmp_path / "parts" / "checkpoints").at(checkpointed)
        assert checkpoint is not None
        assert [step.to_json() for step in checkpoint.steps] == before[:checkpointed]
        with actual_file.open("ab") as stream:
            stream.write(b'{"step": 9, "lo')  # a partial line, as after a kill
    train_into_file("parts", config)
    assert read_lines(actual_file)[:4] == before[:4]
    assert read_lines(actual_file, TIMES) == read_lines(expected_file, TIMES)


def _without(lines: list[bytes], first: int, last: int) -> list[bytes]:
    return lines[:first] + lines[last:]


DAMAGE: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "all": lambda lines: [],
    "one within": lambda lines: _without(lines, 1, 2),
    "a page": lambda lines: [*lines[:1], b"\0" * sum(map(len, lines[1:3])), *lines[3:]],
    "half a line": lambda lines: [*lines[:1], lines[1][:40]],
}


def test_lost_metrics_are_written_again(
    config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train_into_file: Callable[[str, TrainConfig], None],
) -> None:
    """Lines are less safe than checkpoints, which hold the same values and the decision at step 1."""
    original = trainer.Trainer.accumulate_gradients

    def loss_with_nan(*arguments: Any) -> StepResult:
        result = original(*arguments)
        return replace(result, loss=math.nan) if arguments[1].step == 1 else result

    monkeypatch.setattr(trainer.Trainer, "accumulate_gradients", loss_with_nan)
    monkeypatch.setitem(POLICIES, "normal", POLICIES["normal"] | {"nan": "skip"})
    expected_file = tmp_path / "whole.jsonl"
    train_into_file("whole", config)
    assert [line["step"] for line in read_lines(expected_file) if "decisions" in line] == [1]
    kill_after_saves(4, lambda: train_into_file("killed", config))
    before = (tmp_path / "killed.jsonl").read_bytes().splitlines(keepends=True)
    for name, damage in DAMAGE.items():
        shutil.copytree(tmp_path / "killed", tmp_path / name)
        actual_file = tmp_path / f"{name}.jsonl"
        actual_file.write_bytes(b"".join(damage(before)))
        train_into_file(name, config)
        assert actual_file.read_bytes().splitlines(keepends=True)[:4] == before[:4], "with the measured times"
        assert read_lines(actual_file, TIMES) == read_lines(expected_file, TIMES), name


_SCRIPT = """
import os, signal, sys
from pathlib import Path
import pyarrow.parquet as pq
from posttrain.models.task import TaskConfig
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.stage import train

loss, passes = SftObjective.loss, 0

def die(*arguments):
    global passes
    passes += 1
    if passes == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(*arguments)

SftObjective.loss = die
source, records, config, out, scratch = sys.argv[1:]
train(Path(source), pq.read_table(records), TrainConfig.model_validate_json(config),
      TaskConfig(system="Name the intent."), seed=3, out=Path(out), scratch=Path(scratch))
"""


def test_a_training_resumes_after_kill_9_of_another_process(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path
) -> None:
    """The killed process and the resuming one hash strings differently, as any two processes do."""
    config = config.model_copy(update=LORA | {"precision": "bfloat16"})
    pq.write_table(records, tmp_path / "records.parquet")
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONHASHSEED": "1"}
    arguments = [tiny_model, tmp_path / "records.parquet", config.model_dump_json(), tmp_path / "parts", tmp_path / "b"]
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *map(str, arguments)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert Checkpoints(tmp_path / "b" / "checkpoints").steps()[-1] == 5
    assert not (tmp_path / "parts").exists(), "nothing is written before the training is done"
    resumed = train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "parts", scratch=tmp_path / "b")
    meta = train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "whole", scratch=tmp_path / "a")
    assert resumed == meta
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
