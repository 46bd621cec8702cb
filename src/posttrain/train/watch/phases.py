"""Where the time of a step goes: named phases, timed always, and marked for a profiler where one runs."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

PHASES = {
    "data": "reading data",
    "forward": "forward",
    "head": "output head and loss",
    "backward": "backward",
    "clip": "gradient norm and clipping",
    "optimizer": "optimiser",
    "checkpoint": "checkpoint",
    "watch": "watching",
}
"""The phases of a training step, in their order, in words."""

Mark = Callable[[str], AbstractContextManager[object]]


class _Clock(threading.local):
    """One a thread, so that a checkpoint that is written in the background does not count as training."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.inner: list[float] = []  # of each open phase, what those within it took
        self.mark: Mark = nullcontext
        self.wait: Callable[[], None] | None = None


_clock = _Clock()


class phase:  # as a class it costs half of what a generator would
    """``with phase("forward"):`` adds the time of its block to the phase, without that of phases within.

    About two microseconds each. An accelerator works on after the block; only a profiler waits for it.
    """

    __slots__ = ("_mark", "_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._mark = _clock.mark(self._name)
        self._mark.__enter__()
        _clock.inner.append(0.0)
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if _clock.wait is not None:
            _clock.wait()
        took = time.perf_counter() - self._start
        within = _clock.inner.pop()
        _clock.seconds[self._name] = _clock.seconds.get(self._name, 0.0) + took - within
        if _clock.inner:
            _clock.inner[-1] += took
        self._mark.__exit__(kind, error, at)


def seconds() -> dict[str, float]:
    """Seconds of each phase in this thread so far."""
    return dict(_clock.seconds)


def since(before: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase since ``before``, which `seconds` gave; phases that took none are left out."""
    passed = {name: total - before.get(name, 0.0) for name, total in _clock.seconds.items()}
    return {name: took for name, took in passed.items() if took > 0}


@contextmanager
def around_calls(module: Any, make: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Within it every call of a torch module is made within what ``make`` gives, such as ``phase("forward")``."""
    opened: list[AbstractContextManager[object]] = []

    def enter(*given: object) -> None:
        opened.append(make())
        opened[-1].__enter__()

    def leave(*given: object) -> None:
        opened.pop().__exit__(None, None, None)

    hooks = module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def marked(mark: Mark, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Within it every phase of this thread opens ``mark(name)`` as well.

    Args:
        wait: called before a phase is over, such as until an accelerator has done its work.
    """
    before = _clock.mark, _clock.wait
    _clock.mark, _clock.wait = mark, wait
    try:
        yield
    finally:
        _clock.mark, _clock.wait = before
