"""Kills, full disks, damaged and changed inputs: the result is whole or absent, and no temporary folder stays."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from faults import at_lines, in_process, kill_at, start
from posttrain.merge import api
from posttrain.merge.api import MERGE_FILE, merge
from posttrain.merge.plan_builder import build_plan
from posttrain.merge.recipe import Recipe
from posttrain.merge.sources import ModelFolder
from posttrain.store.errors import StorageError, UserError


def _killed_at(command: Callable[[], Any], line: int) -> Callable[[], None]:
    """Returns a function that kills its process at a line of posttrain's work."""

    def run() -> None:
        with at_lines(kill_at(line)):
            command()

    return run


def _count_lines(command: Callable[[], Any]) -> int:
    count = 0

    def act() -> None:
        nonlocal count
        count += 1

    with at_lines(act):
        command()
    return count


def _content(folder: Path) -> dict[str, Any]:
    """Returns everything in a result that equal merges share."""
    content: dict[str, Any] = {file.name: file.read_bytes() for file in folder.iterdir()}
    record = json.loads(content[MERGE_FILE])
    return content | {
        MERGE_FILE: {key: value for key, value in record.items() if key not in ("seconds", "peak_memory")}
    }


def _left_behind(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture
def models(make_model: Any) -> list[Path]:
    return [make_model("base"), make_model("first", 1), make_model("second", 2, shards=2)]


@pytest.fixture
def command(models: list[Path], tmp_path: Path) -> Callable[[], Any]:
    """A merge into ``out`` with files of several shards."""

    def run() -> None:
        merge(models[1:], tmp_path / "out", method="ties", base=models[0], workers=1, shard_bytes=100_000, density=0.5)

    return run


@pytest.mark.slow
def test_a_kill_leaves_nothing_half_written(command: Callable[[], Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    lines, expected = in_process(lambda: _count_lines(command)).value, _content(out)
    from transformers import AutoModelForCausalLM

    _, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    shutil.rmtree(out)
    draw = random.Random(0)
    kills = 5
    killed = whole = 0
    # The last lines are those of the commit, where most can go wrong.
    moments = [int((n + draw.random()) / kills * lines) + 1 for n in range(kills)] + [
        lines - n for n in range(0, 60, 9)
    ]
    for moment in moments:
        outcome = in_process(_killed_at(command, moment))
        assert outcome.error is None, moment
        killed += outcome.killed
        done = out.exists()
        whole += done
        if done:
            assert _content(out) == expected, moment
        # Again: it ends in the same, or says that it is there already; and removes what the kill has left.
        error = in_process(command).error
        assert str(error).startswith("UserError: ") if done else error is None, moment
        assert _content(out) == expected, moment
        assert not _left_behind(tmp_path), moment
        shutil.rmtree(out)
    assert killed > kills
    assert whole > 0


_DISK_CALLS = ("posix_fallocate", "pwrite", "fsync", "rename", "replace", "mkdir")


@pytest.mark.parametrize(("name", "code"), list(zip(_DISK_CALLS, [errno.ENOSPC, errno.EROFS] * 3, strict=True)))
def test_a_disk_that_refuses(
    name: str, code: int, command: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the calls that write is refused once."""
    original = getattr(os, name)
    calls, refused = 0, 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += not (name == "mkdir" and Path(arguments[0]).is_dir())  # an error for one that exists is not an error
        if calls == refused:
            raise OSError(code, os.strerror(code))
        return original(*arguments, **options)

    monkeypatch.setattr(os, name, call)
    command()
    total = calls
    assert total > 0
    shutil.rmtree(tmp_path / "out")
    for refused in sorted({1, total // 2 or 1, total}):
        calls = 0
        with pytest.raises(StorageError) as error:
            command()
        assert "no space left" in str(error.value) or "read-only file system" in str(error.value)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists(), refused
        assert not _left_behind(tmp_path), refused


def test_a_file_size_limit(command: Callable[[], Any], tmp_path: Path) -> None:
    """The kernel itself refuses."""

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        command()

    assert str(in_process(limited).error).startswith("StorageError: ")
    assert not (tmp_path / "out").exists()
    assert not _left_behind(tmp_path)


def test_a_parent_that_cannot_be_written_to(make_model: Any) -> None:
    folder = Path(tempfile.mkdtemp(prefix="posttrain-test-"))  # other users can reach it, unlike pytest's
    folder.chmod(0o755)
    shutil.copytree(make_model("model"), folder / "model")

    def as_nobody() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        else:
            folder.chmod(0o555)
        merge([folder / "model"], folder / "out")

    try:
        assert str(in_process(as_nobody).error).startswith("StorageError: ")
        assert [path.name for path in folder.iterdir()] == ["model"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.slow
def test_two_merges_into_one_folder(command: Callable[[], Any], tmp_path: Path) -> None:
    """One of them wins, the other says so, and the result is whole."""
    command()
    expected = _content(tmp_path / "out")
    for _ in range(2):
        shutil.rmtree(tmp_path / "out")
        errors = [str(process.wait().error).split(":")[0] for process in [start(command) for _ in range(3)]]
        assert sorted(errors) == ["None", "UserError", "UserError"]
        assert _content(tmp_path / "out") == expected
        assert not _left_behind(tmp_path)


def test_a_merge_that_comes_second(command: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = api.run_plan

    def other_first(*arguments: Any) -> Any:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("another's")
        return original(*arguments)

    monkeypatch.setattr(api, "run_plan", other_first)
    with pytest.raises(UserError, match="out: exists and is not empty"):
        command()
    assert (tmp_path / "out" / "file").read_text() == "another's"
    assert not _left_behind(tmp_path)


@pytest.mark.slow
def test_a_flipped_byte_in_a_header(models: list[Path]) -> None:
    """A byte of a header: it is refused, or what the header says of the tensors stays the same."""
    base, model = models[0], models[1]
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    recipe = Recipe.read({"models": [str(base), str(model)]}, "recipe")
    draw = random.Random(0)

    def layout() -> Any:
        sources = {(str(path), None): ModelFolder(str(path), path) for path in (base, model)}
        try:
            build_plan(recipe, sources)
            return {
                name: (header.dtype, header.shape, header.offset)
                for name, header in sources[str(model), None]._tensors.headers.items()
            }
        finally:
            for source in sources.values():
                source.close()

    expected, refused = layout(), 0
    positions = range(0, length, 11)
    for position in positions:
        before = content[position]
        content[position] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        content[position] = before
        try:
            assert layout() == expected, position
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert refused > 0.9 * len(positions)


def _digest(out: Path, model: Path, tensor: str) -> str:
    entry = json.loads((out / MERGE_FILE).read_text())["tensors"][tensor]
    return next(part["digest"] for part in entry["inputs"] if part["model"] == str(model))


def test_a_flipped_byte_in_the_weights_shows_in_the_digests(models: list[Path], tmp_path: Path) -> None:
    """A number that stays finite cannot be told from a right one; the digests of a merge before it differ."""
    _, first, second = models
    tensor = "model.layers.0.mlp.up_proj.weight"
    merge([first, second], tmp_path / "before")
    merge([first, second], tmp_path / "again")
    weights = load_file(first / "model.safetensors")
    assert weights[tensor][20, 3] != 0
    weights[tensor].view(torch.int16)[20, 3] ^= 1
    save_file(weights, first / "model.safetensors", metadata={"format": "pt"})
    merge([first, second], tmp_path / "after")
    assert _digest(tmp_path / "before", first, tensor) == _digest(tmp_path / "again", first, tensor)
    assert _digest(tmp_path / "before", first, tensor) != _digest(tmp_path / "after", first, tensor)
    for other in (name for name in weights if name != tensor):
        assert _digest(tmp_path / "before", first, other) == _digest(tmp_path / "after", first, other)
    weights[tensor].view(torch.int16)[20, 3] |= 0x7F80  # all bits of the exponent
    save_file(weights, first / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"tensor {tensor} holds NaN or infinite numbers"):
        merge([first, second], tmp_path / "nan")
    assert not (tmp_path / "nan").exists()


@pytest.mark.parametrize("change", ["truncate", "rewrite", "old time", "tokenizer", "folder"])
def test_an_input_that_changes_during_the_merge(
    change: str, models: list[Path], command: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, file = api.run_plan, models[1] / "model.safetensors"

    def changed_before(*arguments: Any) -> Any:
        if change == "truncate":
            os.truncate(file, 100_000)
        elif change == "tokenizer":
            (models[0] / "tokenizer.json").unlink()
        elif change == "folder":
            shutil.rmtree(models[1])
        else:
            times = file.stat()
            with file.open("r+b") as opened:
                opened.seek(-2, os.SEEK_END)
                opened.write(b"\0\0")
            if change == "old time":
                os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        return original(*arguments)

    monkeypatch.setattr(api, "run_plan", changed_before)
    texts = {"truncate": "model.safetensors: ended amid tensor", "tokenizer": "tokenizer.json: is gone since the work"}
    text = texts.get(change, "was changed while it was read")
    with pytest.raises(UserError, match=text):
        command()
    assert not (tmp_path / "out").exists()
    assert not _left_behind(tmp_path)


def test_an_input_that_the_disk_cannot_read(
    models: list[Path], command: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(UserError, match=r"tensor .* cannot be read: Input/output error; check the disk"):
        command()
    assert not (tmp_path / "out").exists()


def test_a_disk_that_returns_other_bytes_than_were_written(
    command: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.store.errors import WorkError

    original, calls = os.pwrite, 0

    def write(descriptor: int, content: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 20:
            damaged = bytearray(content)
            damaged[0] ^= 1
            content = damaged
        return original(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(WorkError, match="reads other than it was written"):
        command()
    assert not (tmp_path / "out").exists()
    assert not _left_behind(tmp_path)


def test_an_interrupt(command: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = os.pwrite, 0

    def interrupt(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 15:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(os, "pwrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        command()
    assert not (tmp_path / "out").exists()
    assert not _left_behind(tmp_path)
