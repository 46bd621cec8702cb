"""The processes of a merge: what ends one of them ends the merge, and nothing of it stays."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.merge.api import merge
from posttrain.merge.shard_writer import ShardWriter
from posttrain.store.errors import StorageError, UserError, WorkError


@pytest.fixture
def models(make_model: Any) -> list[Path]:
    return [make_model("first", 1), make_model("second", 2)]


@pytest.fixture
def in_workers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Calls a function before each tensor that another process than this one writes."""
    parent, write = os.getpid(), ShardWriter.write

    def install(function: Callable[[], Any]) -> None:
        def write_tensor(writer: ShardWriter, tensor: str, parts: Iterable[Tensor]) -> str:
            if os.getpid() != parent:
                function()
            return write(writer, tensor, parts)

        monkeypatch.setattr(ShardWriter, "write", write_tensor)

    return install


def refuse() -> None:
    raise StorageError("no space left on device")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), WorkError, "a forked process was killed"),
        (refuse, StorageError, "no space left on device"),
    ],
    ids=["killed", "refused"],
)
def test_a_worker_that_fails_ends_the_merge(
    function: Callable[[], Any],
    error: type[Exception],
    message: str,
    models: list[Path],
    tmp_path: Path,
    in_workers: Callable[[Callable[[], Any]], None],
) -> None:
    in_workers(function)
    with pytest.raises(error, match=message):
        merge(models, tmp_path / "out", workers=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_mistakes_in_the_input_are_named_as_by_one_process(models: list[Path], tmp_path: Path, make_model: Any) -> None:
    def damage(weights: dict[str, Tensor]) -> None:
        weights["model.norm.weight"][3] = torch.nan

    damaged = make_model("damaged", 3, change=damage)
    messages = []
    for workers in (1, 3):
        with pytest.raises(UserError) as error:
            merge([models[0], damaged], tmp_path / "out", workers=workers)
        messages.append((str(error.value), error.value.where, error.value.fix))
    assert messages[0] == messages[1]
    assert "model.norm.weight" in messages[0][0]


def test_workers_end_with_their_parent(
    models: list[Path], tmp_path: Path, in_workers: Callable[[Callable[[], Any]], None]
) -> None:
    workers = tmp_path / "workers"
    workers.mkdir()

    def wait() -> None:
        (workers / str(os.getpid())).touch()
        time.sleep(60)

    child = os.fork()
    if not child:
        in_workers(wait)
        merge(models, tmp_path / "out", workers=2)
        os._exit(0)
    while len(list(workers.iterdir())) < 2:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 20
    while any(
        Path("/proc", worker.name, "status").exists() and not _is_zombie(worker.name) for worker in workers.iterdir()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (tmp_path / "out").exists()


def _is_zombie(process: str) -> bool:
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
