"""A training that is killed, whenever and however often, ends as if it had not been."""

import json
import math
import os
import signal
import subprocess
import sys
import time
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
from posttrain.train.config import LoraConfig, TrainConfig
from posttrain.train.monitor.metrics import JsonlSink
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.stage import train
from posttrain.train.trainer import StepResult

pytestmark = pytest.mark.slow

LORA = {"method": "lora", "lora": LoraConfig(rank=4, dropout=0.3)}
METHODS = {
    "float32": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    "autocast": {"precision": "autocast"},
    "lora-float32": LORA | {"precision": "float32"},
    "lora-bfloat16": LORA | {"precision": "bfloat16"},
}
TASK = TaskConfig(system="Name the intent.")
TIMES = ("seconds", "tokens_per_second", "memory_bytes", "data_wait", "mfu", "phases")


class Killed(BaseException):
    """Stands for the death of the process."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def killed_after(steps: int, do: Callable[[], object]) -> None:
    """Do the work in a process that dies in its first forward pass after so many checkpoints."""
    saved = 0
    save, loss = Checkpoints.save, SftObjective.loss

    def counted(self: Checkpoints, step: int, checkpoint: Checkpoint, metric: float | None = None) -> bool:
        nonlocal saved
        save(self, step, checkpoint, metric)
        saved += 1
        return True

    def killed(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        if saved == steps:
            raise Killed
        return loss(self, lm, packed, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", counted)
        patch.setattr(SftObjective, "loss", killed)
        with pytest.raises(Killed):
            do()


@pytest.mark.parametrize("method", METHODS)
def test_killed_at_every_step(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, method: str
) -> None:
    config = config.model_copy(update=METHODS[method])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    meta = train(tiny_model, records, config, TASK, seed=3, out=whole, scratch=tmp_path / "a")
    steps = meta["steps"]
    assert steps == 6

    def again() -> dict[str, Any]:
        torch.manual_seed(99)  # a new process's generators stand anywhere
        return train(tiny_model, records, config, TASK, seed=3, out=parts, scratch=tmp_path / "b")

    for _ in range(steps - 1):  # each process does one step and dies in the next
        killed_after(1, again)
    assert again() == meta
    assert contents(parts) == contents(whole)


@pytest.mark.parametrize("step", range(6))
def test_killed_once(tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, step: int) -> None:
    meta = train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "whole", scratch=tmp_path / "a")

    def again() -> dict[str, Any]:
        return train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "parts", scratch=tmp_path / "b")

    killed_after(step, again)
    assert again() == meta
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_finished_steps_are_not_done_again(
    tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again() -> dict[str, Any]:
        return train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "out", scratch=tmp_path / "s")

    killed_after(4, again)
    done = 0
    loss = SftObjective.loss

    def counted(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
        nonlocal done
        done += 1
        return loss(self, lm, packed, rows)

    monkeypatch.setattr(SftObjective, "loss", counted)
    again()
    assert done == 2


def test_a_damaged_checkpoint_costs_steps_and_nothing_else(
    tiny_model: Path,
    records: pa.Table,
    config: TrainConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    meta = train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "whole", scratch=tmp_path / "a")

    def again() -> dict[str, Any]:
        return train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "parts", scratch=tmp_path / "b")

    killed_after(4, again)
    file = tmp_path / "b" / "checkpoints" / "step-000000004" / "tensors.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert again() == meta
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert "step-000000004 is damaged (tensors.safetensors does not match its checksums in `" in caplog.text


@pytest.fixture
def into(tiny_model: Path, records: pa.Table, tmp_path: Path) -> Callable[[str, TrainConfig], None]:
    """``into(name, config)``: train, with a line a step in the file ``name.jsonl``."""

    def train_into(name: str, config: TrainConfig) -> None:
        sink = JsonlSink(tmp_path / f"{name}.jsonl")
        out, scratch = tmp_path / f"{name}-out", tmp_path / name
        try:
            train(tiny_model, records, config, TASK, seed=3, out=out, scratch=scratch, sink=sink)
        finally:
            sink.close()

    return train_into


def read_lines(file: Path, leave_out: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    result = map(json.loads, file.read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in leave_out} for line in result]


def test_the_metrics_of_a_killed_training(
    config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    into: Callable[[str, TrainConfig], None],
) -> None:
    """No step stands twice and none is missing, and a step that need not be done again is as it was measured."""
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 2})})

    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    into("whole", config)
    loss = SftObjective.loss
    for checkpointed in (2, 4):
        done = 0

        def killed(self: SftObjective, lm: LanguageModel, packed: Packed, rows: list[int]) -> Loss:
            nonlocal done
            done += 1
            if done == 4:  # with one step done since the checkpoint
                raise Killed
            return loss(self, lm, packed, rows)

        with monkeypatch.context() as patch:
            patch.setattr(SftObjective, "loss", killed)
            with pytest.raises(Killed):
                into("parts", config)
        before = read_lines(parts)
        assert [line["step"] for line in before] == list(range(checkpointed + 1))
        saved = Checkpoints(tmp_path / "parts" / "checkpoints").at(checkpointed)
        assert saved is not None
        assert [step.to_json() for step in saved.steps] == before[:checkpointed]
        with parts.open("ab") as file:
            file.write(b'{"step": 9, "lo')  # as a kill leaves it
    into("parts", config)
    assert read_lines(parts)[:4] == before[:4]
    assert read_lines(parts, TIMES) == read_lines(whole, TIMES)


def _without(lines: list[bytes], first: int, last: int) -> list[bytes]:
    return lines[:first] + lines[last:]


LOST: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "all": lambda lines: [],
    "the last": lambda lines: lines[:3],
    "one within": lambda lines: _without(lines, 1, 2),
    "a page": lambda lines: [*lines[:1], b"\0" * sum(map(len, lines[1:3])), *lines[3:]],
    "half a line": lambda lines: [*lines[:1], lines[1][:40]],
}


@pytest.mark.parametrize("lost", LOST)
def test_metrics_that_were_lost_are_written_again(
    config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    into: Callable[[str, TrainConfig], None],
    lost: str,
) -> None:
    """Lines are not as safe as checkpoints, which hold the same values: with what was decided at step 1."""
    usual = trainer.Trainer.accumulate_gradients

    def spoilt(*arguments: Any) -> StepResult:
        result = usual(*arguments)
        return replace(result, loss=math.nan) if arguments[1].step == 1 else result

    monkeypatch.setattr(trainer.Trainer, "accumulate_gradients", spoilt)
    config = TrainConfig.read(config.model_dump(mode="json") | {"watch": {"nan": {"action": "skip"}}}, "here")
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"

    into("whole", config)
    assert [line["step"] for line in read_lines(whole) if "decisions" in line] == [1]
    killed_after(4, lambda: into("parts", config))
    before = parts.read_bytes().splitlines(keepends=True)
    parts.write_bytes(b"".join(LOST[lost](before)))
    into("parts", config)
    assert parts.read_bytes().splitlines(keepends=True)[:4] == before[:4], "with the times that were measured"
    assert read_lines(parts, TIMES) == read_lines(whole, TIMES)


_SCRIPT = """
import sys
from pathlib import Path
import pyarrow.parquet as pq
from posttrain.models.task import TaskConfig
from posttrain.train.config import TrainConfig
from posttrain.train.stage import train

source, records, config, out, scratch = sys.argv[1:]
train(Path(source), pq.read_table(records), TrainConfig.model_validate_json(config),
      TaskConfig(system="Name the intent."), seed=3, out=Path(out), scratch=Path(scratch))
"""


def test_kill_9_in_another_process(tiny_model: Path, records: pa.Table, config: TrainConfig, tmp_path: Path) -> None:
    """Another process than the one that goes on, so that they hash strings differently, as every two do."""
    config = config.model_copy(update=LORA | {"precision": "bfloat16", "epochs": 14})
    pq.write_table(records, tmp_path / "records.parquet")
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONHASHSEED": "1"}
    places = [tiny_model, tmp_path / "records.parquet", config.model_dump_json(), tmp_path / "parts", tmp_path / "b"]
    first = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *map(str, places)], env=environment, stderr=subprocess.PIPE, text=True
    )

    def wait_for_a_checkpoint(process: subprocess.Popen[str], after: int) -> int:
        while process.poll() is None:
            names = sorted((tmp_path / "b" / "checkpoints").glob("step-*"))
            if names and (newest := int(names[-1].name.removeprefix("step-"))) >= after:
                return newest
            time.sleep(0.005)
        raise AssertionError(process.communicate()[1])

    reached = wait_for_a_checkpoint(first, 5)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert reached < 41
    assert not (tmp_path / "parts").exists(), "nothing is written before the training is done"
    resumed = train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "parts", scratch=tmp_path / "b")
    meta = train(tiny_model, records, config, TASK, seed=3, out=tmp_path / "whole", scratch=tmp_path / "a")
    assert resumed == meta
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
