"""Faults for tests: a process that is killed at a line or a call, and a disk that refuses.

``in_process(function)`` runs a function in a process of its own. Inside it, ``kill_at(number)`` returns a function
that kills the process when it is called for that time, and `at_lines`, `at_calls` and `at_transactions` call it at
each line of posttrain, at each call that changes the disk, and around each statement and commit of a database. So a
test that counts the events of an uninterrupted run can kill at any of them, and a seed repeats the kill exactly.
"""

import gc
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import posttrain

PACKAGE = str(Path(posttrain.__file__).parent)
NEEDS_SPACE = ("mkdir", "rename", "replace", "fsync")
REMOVALS = ("unlink", "rmdir")
"""Calls that succeed on a full disk."""

Act = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """The end of a process: killed, or a value (JSON), or an error (``Type: message``)."""

    killed: bool
    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Process:
    """A process that `start` has started; wait for each."""

    id: int
    reader: int

    def wait(self) -> Outcome:
        with os.fdopen(self.reader, "rb") as pipe:
            message = pipe.read()
        _, status = os.waitpid(self.id, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return Outcome(killed=True)
        return Outcome(killed=False, **json.loads(message))

    def kill(self) -> None:
        os.kill(self.id, signal.SIGKILL)
        assert self.wait().killed


def start(function: Callable[[], Any]) -> Process:
    """Starts a function in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        gc.freeze()  # a collection would touch, and so copy, all that the tests before have left in memory
        os.close(reader)
        outcome: dict[str, Any] = {}
        try:
            outcome["value"] = function()
        except BaseException as error:  # noqa: BLE001 - every error is reported to the parent
            outcome["error"] = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writer)
    return Process(child, reader)


def in_process(function: Callable[[], Any]) -> Outcome:
    """Runs a function in a process of its own."""
    return start(function).wait()


def kill_at(number: int | None) -> Act:
    """Returns a function that kills the process when it is called for that time, counted from 0; None: never."""
    events = itertools.count()

    def act() -> None:
        if next(events) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


@contextmanager
def at_calls(act: Act, calls: Sequence[str] = NEEDS_SPACE + REMOVALS) -> Iterator[None]:
    """Calls ``act`` before each of these functions of `os`."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            act()
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, wrap(getattr(os, name)))
        yield


@contextmanager
def at_transactions(act: Act, engine: Any) -> Iterator[None]:
    """Calls ``act`` before each statement and each commit of an engine of SQLAlchemy, or of the class for all."""
    from sqlalchemy import event

    def listener(*arguments: Any) -> None:
        act()

    for name in ("before_cursor_execute", "commit"):
        event.listen(engine, name, listener)
    yield
    for name in ("before_cursor_execute", "commit"):
        event.remove(engine, name, listener)


@contextmanager
def at_lines(act: Act, skipped: Sequence[str] = ()) -> Iterator[None]:
    """Calls ``act`` at each line of posttrain, in all threads that start meanwhile; not in files that are skipped."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or name.removeprefix(PACKAGE + os.sep) in skipped:
            return None
        if event == "line":
            act()
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
