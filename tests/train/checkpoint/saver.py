"""Saves checkpoints and logs each call that changes the disk, at any of which the process can be killed."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from faults import kill_at
from posttrain.train.checkpoint import writer
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint
from posttrain.train.monitor.metrics import StepValues


def make(step: int, version: int = 0, size: int = 50) -> Checkpoint:
    """The checkpoint of a step; no two steps or versions share a tensor."""
    generator = torch.Generator().manual_seed(1000 * version + step)
    tensors = {
        "master.w": torch.randn(size, 7, generator=generator),
        "half": torch.randn(11, generator=generator).bfloat16(),
        "step": torch.tensor(float(step)),
        "bytes": torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8),
        "count": torch.tensor([step, version]),
    }
    return Checkpoint(tensors, {"step": step, "version": version}, [step_values(n, version) for n in range(step)])


def step_values(step: int, version: int = 0) -> StepValues:
    """The values of a step; no two versions have equal ones."""
    return StepValues(
        step=step,
        loss=0.1 * step,
        loss_count=3,
        grad_norm=1.0,
        supervised_tokens=3,
        epoch=0,
        lr=1e-3,
        tokens=7,
        seconds=0.5 + version,
        tokens_per_second=14.0,
        memory_bytes=2**30,
        group_norms={"layers.0": 0.25 + step},
    )


@dataclass(frozen=True)
class Request:
    """The work of one process: ``actions`` are ``[name, arguments...]``; see `act`."""

    folder: str
    trace: str
    actions: list[list[Any]]
    config: dict[str, Any] = field(default_factory=dict)
    kill_at: int | None = None  # the number of the event
    hang: bool = False  # die as soon as save returns, before the first byte is written
    size: int = 50


class Events:
    """Logs each call that changes the disk, before and after it, and kills the process at event ``kill_at``."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.kill = kill_at(request.kill_at)
        self.file = os.open(request.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, event: str) -> None:
        os.write(self.file, f"{event}\n".encode())
        self.kill()

    def name(self, path: Any) -> str:
        """A path within the folder; the names of temporary folders differ from run to run."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        try:
            parts = Path(path).relative_to(self.request.folder).parts
        except ValueError:
            return Path(path).name
        return "/".join(["tmp", "*", *parts[2:]] if parts[:1] == ("tmp",) and len(parts) > 1 else parts) or "."

    def traced(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            event = " ".join([name, *map(self.name, arguments[: 2 if name in ("rename", "replace", "link") else 1])])
            self(f"before {event}")
            # A kill, unlike a power cut, loses nothing that was written.
            result = None if name == "fsync" else function(*arguments, **options)
            self(f"after {event}")
            return result

        return call

    def written_twice(self, name: str, function: Callable[..., Any], index: int) -> Callable[..., Any]:
        """A function that writes a file, with one event when half of it is written."""

        def call(*arguments: Any, **options: Any) -> Any:
            path = Path(arguments[index])
            event = f"{name} {self.name(path)}"
            self(f"before {event}")
            if self.request.hang:
                threading.Event().wait()
            result = function(*arguments, **options)
            os.truncate(path, path.stat().st_size // 2)
            self(f"during {event}")
            result = function(*arguments, **options)
            self(f"after {event}")
            return result

        return call

    def appended_in_halves(self, name: str, function: Callable[[Path, bytes], Any]) -> Callable[[Path, bytes], Any]:
        """A function that appends to a file, with one event when half of it is written."""

        def call(path: Path, content: bytes) -> None:
            event = f"{name} {self.name(path)}"
            self(f"before {event}")
            function(path, content[: len(content) // 2])
            self(f"during {event}")
            function(path, content[len(content) // 2 :])
            self(f"after {event}")

        return call


def _trace_disk_calls(events: Events) -> None:
    for name in ("mkdir", "rename", "replace", "link", "fsync", "unlink", "rmdir"):
        setattr(os, name, events.traced(name, getattr(os, name)))
    writer.write_tensors = events.written_twice("write_tensors", writer.write_tensors, 0)
    writer.append = events.appended_in_halves("append", writer.append)
    Path.write_bytes = events.written_twice("write_bytes", Path.write_bytes, 0)  # type: ignore[method-assign]


def act(request: Request) -> None:
    """Does the work of a process, which has no other from then on."""
    events = Events(request)
    _trace_disk_calls(events)
    with Checkpoints(Path(request.folder), CheckpointConfig(**request.config)) as checkpoints:
        for name, *arguments in request.actions:
            match name:
                case "save":
                    step, version = arguments
                    checkpoints.save(step, make(step, version, request.size))
                    if request.hang:
                        os.kill(os.getpid(), signal.SIGKILL)
                case "latest":
                    checkpoints.latest()
                case "rewind":
                    checkpoints.rewind(*arguments)
                case "resume":  # as a training does that is killed repeatedly
                    result = checkpoints.latest()
                    step = result.state["step"] if result else 0
                    while True:
                        step += 1
                        checkpoints.save(step, make(step, 0, request.size))
