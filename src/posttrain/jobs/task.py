"""A task: one call of a function by a runner, the messages that it sends, and how it ended."""

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from posttrain.jobs.gpus import reset_gpu_peak
from posttrain.jobs.memory import UNKNOWN_MEMORY, Memory, peak_memory
from posttrain.store.errors import UserError, WorkError, to_line
from posttrain.store.files import make_folder


@dataclass(frozen=True)
class Task:
    """One call of a runner's function.

    Attributes:
        number: of the task; no two that run at a time have the same.
        argument: what the function gets; pickled where it runs in another process.
        folder: for its files, which the runner makes; two runs of a task never use it at a time.
    """

    number: int
    argument: Any
    folder: Path


class TaskContext:
    """The argument of a runner's function: the task's own argument, its folder, and messages.

    Attributes:
        number, argument, folder: those of the task.
    """

    def __init__(self, task: Task, send: Callable[[Any, Memory], Any], show_life: Callable[[], bool]) -> None:
        self.number, self.argument, self.folder = task.number, task.argument, task.folder
        self._send, self._show_life = send, show_life

    def send(self, message: Any) -> Any:
        """Sends a message to the handler of the runner, and returns its answer."""
        return self._send(message, peak_memory())

    def show_life(self) -> bool:
        """Says that the task makes progress, where the next message is far; costs nothing to call often.

        Returns:
            Whether the task continues; always, unless it runs in the process of its runner.
        """
        return self._show_life()


TaskFunction = Callable[[TaskContext], Any]
"""The function of a runner; what it returns is the value of the outcome."""

OUT_OF_MEMORY = "out of memory"
"""Prefix of error lines that report exhausted memory, the machine's or a GPU's."""

OutcomeKind = Literal["returned", "failed", "out_of_memory", "killed"]


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        kind: ``returned``; ``failed``; ``out_of_memory``, so that it may be run again without others beside it; or
            ``killed``, by a signal from outside, so that it may be run again: perhaps the kernel's, as the machine's
            memory ran out.
        value: what the function returned.
        error: why it failed, in a line.
        seconds: Time that the run took.
        memory: the most that its process had in use.
    """

    kind: OutcomeKind
    value: Any = None
    error: str = ""
    seconds: float = 0.0
    memory: Memory = UNKNOWN_MEMORY


class Handler(Protocol):
    """Receives the messages and outcomes of a runner, in the thread that calls `Runner.wait`."""

    def message(self, number: int, message: Any, memory: Memory) -> Any:
        """A task has sent a message, and had so much memory in use at most; returns the answer."""

    def show_life(self, number: int) -> bool:
        """Returns whether a run in this process, which nothing else can end, continues."""

    def ended(self, number: int, outcome: Outcome) -> None:
        """A run is over, and its worker is free."""


def run_task(
    function: TaskFunction, task: Task, send: Callable[[Any, Memory], Any], show_life: Callable[[], bool]
) -> Outcome:
    """Runs a task in this process.

    Args:
        function: runs it.
        task: the task.
        send: called with each message and the most memory in use; returns the answer.
        show_life: called where the task says that it makes progress; returns whether it continues.
    """
    began = time.monotonic()
    reset_gpu_peak()

    def outcome(kind: OutcomeKind, value: Any = None, error: str = "") -> Outcome:
        return Outcome(kind, value, error, time.monotonic() - began, peak_memory())

    try:
        make_folder(task.folder)
        return outcome("returned", function(TaskContext(task, send, show_life)))
    # Whatever the function raises is the task's outcome.
    except Exception as error:  # noqa: BLE001
        line = error_line(error)
        _write_traceback(task)
        return outcome("out_of_memory" if line.startswith(OUT_OF_MEMORY) else "failed", error=line)


def error_line(error: BaseException) -> str:
    """Returns an exception as one line."""
    # A database and a file hold neither half a surrogate nor NUL, which messages of other programs do.
    text = to_line(str(error))[:300]
    name = type(error).__name__
    if isinstance(error, MemoryError) or OUT_OF_MEMORY in text.lower():
        return f"{OUT_OF_MEMORY}{f': {text}' if text else ''}"
    # Their texts are for users as they are.
    return text if isinstance(error, UserError | WorkError) else f"{name}: {text}" if text else name


def _write_traceback(task: Task) -> None:
    """Writes where the function failed into ``errors/NAME.txt``, beside the task's folder."""
    file = task.folder.parent / "errors" / f"{task.folder.name}.txt"
    # A disk that is full must not hide the error itself.
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        file.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
