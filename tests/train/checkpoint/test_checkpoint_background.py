"""Saving during training: a checkpoint holds the values at the time of the call, and no error is lost."""

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.store.errors import UserError, WorkError
from posttrain.train.checkpoint import folder as folder_module
from posttrain.train.checkpoint import writer
from posttrain.train.checkpoint import writer as write_module
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.format import Checkpoint

Make = Callable[..., Checkpoint]
Same = Callable[[Checkpoint | None, Checkpoint], bool]
Background = Callable[..., Checkpoints]


class Slow:
    """A disk that blocks every write until ``go`` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self.at_once = self.most = 0
        write_tensors = write_module.write_tensors

        def slow(*arguments: Any, **options: Any) -> Any:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.reached.set()
            assert self.go.wait(60)
            result = write_tensors(*arguments, **options)
            self.at_once -= 1
            return result

        patch.setattr(write_module, "write_tensors", slow)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, background: Background) -> Iterator[Slow]:
    slow = Slow(monkeypatch)
    yield slow
    slow.go.set()  # before ``background`` closes the checkpoints that wait for it


def test_save_returns_before_anything_is_written(
    background: Background, slow: Slow, make: Make, same: Same, folder: Path
) -> None:
    checkpoints = background()
    checkpoints.save(1, make(1))
    assert slow.reached.wait(60)
    assert list(folder.glob("step-*")) == []
    slow.go.set()
    checkpoints.close()
    assert same(Checkpoints(folder).latest(), make(1))


def test_changes_after_save_are_not_saved(background: Background, slow: Slow, make: Make, same: Same) -> None:
    checkpoints = background()
    checkpoint = make(1)
    checkpoint.tensors["turned"] = torch.arange(6.0).reshape(2, 3).T
    expected = Checkpoint(
        {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}, make(1).state, make(1).steps
    )
    checkpoints.save(1, checkpoint)
    for tensor in checkpoint.tensors.values():
        tensor.zero_()
    checkpoint.tensors.clear()
    checkpoint.state["more"] = 1
    checkpoint.steps.append(make(2).steps[1])
    slow.go.set()
    assert same(checkpoints.latest(), expected)


def test_the_buffers_are_reused(background: Background, make: Make, same: Same) -> None:
    """Also when tensors appear, disappear, or change shape and dtype under the same name."""
    checkpoints = background(keep_last=9)
    saved = {step: make(step) for step in range(1, 6)}
    saved[2].tensors["half"] = torch.ones(3, 3)
    saved[3].tensors["half"] = torch.ones(3, 3).double()
    del saved[4].tensors["step"]
    saved[5].tensors["fresh"] = torch.zeros(2)
    for step, checkpoint in saved.items():
        checkpoints.save(step, checkpoint)
    checkpoints.close()
    for step, checkpoint in saved.items():
        assert same(checkpoints.at(step), checkpoint)


def test_prepare_allocates_the_memory_ahead(
    background: Background, make: Make, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ``prepare``, ``save`` allocates nothing; the saved tensors may differ from the prepared ones."""
    checkpoints = background()
    checkpoints.prepare(make(1).tensors)
    checkpoints.save(1, make(1))
    checkpoints.close()
    assert same(checkpoints.at(1), make(1))
    checkpoints.prepare({"half": torch.ones(2), "gone": torch.ones(3)})
    checkpoints.save(2, make(2))
    assert same(checkpoints.at(2), make(2))
    checkpoints.close()
    checkpoints.prepare(make(3).tensors)
    checkpoints._snapshots._ready.result()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", raise_error)
        checkpoints.save(3, make(3))
        checkpoints._writing.result()
    assert same(checkpoints.at(3), make(3))


def test_a_failed_prepare_surfaces_at_save(background: Background, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = background()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", raise_error)
        checkpoints.prepare(make(1).tensors)
        with pytest.raises(ZeroDivisionError):
            checkpoints.save(1, make(1))
    checkpoints.save(2, make(2))
    assert checkpoints.steps() == [2]


def test_saves_do_not_overlap(background: Background, slow: Slow, make: Make, same: Same) -> None:
    checkpoints = background(keep_last=9)
    checkpoints.save(1, make(1))
    assert slow.reached.wait(60)
    done = threading.Event()

    def save_second() -> None:
        checkpoints.save(2, make(2))
        done.set()

    thread = threading.Thread(target=save_second)
    thread.start()
    assert not done.wait(0.2), "the second waits for the first"
    slow.go.set()
    thread.join(60)
    assert done.is_set()
    checkpoints.close()
    assert slow.most == 1
    assert checkpoints.steps() == [1, 2]
    assert same(checkpoints.at(1), make(1))


def test_reading_waits_for_the_writer(background: Background, slow: Slow, make: Make, same: Same) -> None:
    checkpoints = background()
    checkpoints.save(1, make(1))
    assert slow.reached.wait(60)
    threading.Timer(0.1, slow.go.set).start()
    assert same(checkpoints.latest(), make(1))


def raise_no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raise_error(*_: object, **__: object) -> None:
    raise ZeroDivisionError("boom")


def write_part_then_raise(path: Path, _: object) -> None:
    path.write_bytes(b"half")
    raise_no_space()


def append_half_then_raise(path: Path, lines: bytes) -> None:
    with path.open("ab") as file:
        file.write(lines[: len(lines) // 2])
    raise_no_space()


FULL = {
    "tensors": (write_module, "write_tensors", raise_no_space),
    "half of the tensors": (write_module, "write_tensors", write_part_then_raise),
    "steps": (writer, "append", raise_no_space),
    "half of the steps": (writer, "append", append_half_then_raise),
    "files": (Path, "write_bytes", raise_no_space),
    "sync of a file": (write_module, "sync_file", raise_no_space),
    "sync of the folder": (write_module, "sync_folder", raise_no_space),
    "rename": (Path, "rename", raise_no_space),
    "sync after the rename": (folder_module, "sync_folder", raise_no_space),
    "temporary folder": (folder_module, "temporary_folder", raise_no_space),
}


@pytest.mark.parametrize("fault", FULL)
@pytest.mark.parametrize("trigger", ["save", "close"])
def test_a_full_disk_does_not_stop_the_training(
    background: Background,
    make: Make,
    same: Same,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    folder: Path,
    fault: str,
    trigger: str,
) -> None:
    checkpoints = background(keep_last=9)
    for step in (1, 2):
        checkpoints.save(step, make(step))
    checkpoints.close()
    with monkeypatch.context() as patch:
        patch.setattr(*FULL[fault])
        checkpoints.save(3, make(3))
        checkpoints.close() if trigger == "close" else checkpoints.save(4, make(4))
        checkpoints.close()
    failed_steps = [3] if trigger == "close" else [3, 4]
    assert len(caplog.messages) == len(failed_steps), "each is reported once"
    for step, message in zip(failed_steps, caplog.messages, strict=True):
        assert message.startswith(f"no checkpoint of step {step} (")
        assert message.endswith(": no space left on device): training continues without it")
    assert list((folder / "tmp").iterdir()) == [], "unfinished files are removed"
    assert checkpoints.steps()[:2] == [1, 2]
    for step in checkpoints.steps():
        assert same(checkpoints.at(step), make(step)), "the remaining checkpoints are complete"
    # With space again, saving works.
    checkpoints.save(5, make(5))
    checkpoints.close()
    assert same(checkpoints.latest(), make(5))


def test_a_full_disk_in_the_foreground_is_an_error(
    foreground: Checkpoints, make: Make, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreground.save(1, make(1))
    with monkeypatch.context() as patch:
        patch.setattr(write_module, "write_tensors", raise_no_space)
        with pytest.raises(UserError, match="no space left on device"):
            foreground.save(2, make(2))
    assert foreground.steps() == [1]
    assert same(foreground.latest(), make(1))
    foreground.close()


def test_any_error_surfaces(
    background: Background, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = background()
    with monkeypatch.context() as patch:
        patch.setattr(write_module, "sync_file", raise_error)
        checkpoints.save(1, make(1))
        assert checkpoints.latest() is None, "reading does not clear the error"
        with pytest.raises(ZeroDivisionError, match="boom"):
            checkpoints.save(2, make(2))
    assert "saving the checkpoint of step 1 failed: boom" in caplog.text
    assert checkpoints.steps() == []


def test_an_error_while_hashing_surfaces(background: Background, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = background()
    with monkeypatch.context() as patch:
        patch.setattr(writer, "xxh3_128", raise_error)
        checkpoints.save(1, make(1))
        with pytest.raises(ZeroDivisionError):
            checkpoints.close()


def test_leaving_the_context_closes(folder: Path, make: Make, same: Same, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, make(1))
    with monkeypatch.context() as patch:
        patch.setattr(write_module, "write_tensors", raise_error)
        with pytest.raises(ZeroDivisionError), Checkpoints(folder) as checkpoints:
            checkpoints.save(2, make(2))
    assert same(Checkpoints(folder).latest(), make(1))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "steps.jsonl", "manifest.json"])
def test_a_corrupted_file_is_detected_before_the_rename(
    foreground: Checkpoints, make: Make, same: Same, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The files are read back and compared with memory before any older checkpoint is removed."""
    foreground.save(1, make(1))
    forget = write_module._drop_page_cache

    def flip_and_forget(path: Path) -> None:
        if path.name == name:
            flip(path)
        forget(path)

    with monkeypatch.context() as patch:
        patch.setattr(write_module, "_drop_page_cache", flip_and_forget)
        with pytest.raises(WorkError, match=rf"read back after writing, {name} .*; check the disk and the memory"):
            foreground.save(2, make(2))
    assert foreground.steps() == [1]
    assert same(foreground.latest(), make(1))


def test_tensors_that_change_during_the_write_are_detected(
    foreground: Checkpoints, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksums are those of the tensors passed to ``save``, not of the bytes on the disk."""
    write_tensors = write_module.write_tensors

    def write_twice(path: Path, tensors: dict[str, torch.Tensor]) -> Any:
        result = write_tensors(path, tensors)
        write_tensors(path, {**tensors, "half": tensors["half"] + 1})
        return result

    monkeypatch.setattr(write_module, "write_tensors", write_twice)
    with pytest.raises(WorkError, match="does not match its checksums in `half`"):
        foreground.save(1, make(1))
    assert foreground.steps() == []


@pytest.mark.slow
def test_an_exit_without_close_waits(folder: Path) -> None:
    """A script that ends while its last checkpoint is being written still gets that checkpoint."""
    code = f"""
import time
from pathlib import Path
import torch
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint
from posttrain.train.checkpoint import writer
write_tensors = writer.write_tensors
def slow(*arguments):
    time.sleep(0.5)  # until the interpreter is on its way out
    return write_tensors(*arguments)
writer.write_tensors = slow
Checkpoints(Path({str(folder)!r}), CheckpointConfig()).save(1, Checkpoint({{"x": torch.ones(3)}}, {{}}))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    result = Checkpoints(folder).latest()
    assert result is not None
    assert torch.equal(result.tensors["x"], torch.ones(3))


def test_leftovers_of_a_killed_process_are_removed(
    foreground: Checkpoints, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    leftover = foreground.folder / "tmp" / "0123"
    leftover.mkdir(parents=True)
    (leftover / "tensors.safetensors").write_bytes(b"half")
    (foreground.folder / "tmp" / "0123.lock").touch()
    assert foreground.latest() is None
    foreground.save(1, make(1))
    assert list((foreground.folder / "tmp").iterdir()) == []
