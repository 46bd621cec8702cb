"""Ctrl-C, and the SIGTERM of a scheduler that wants the machine back: the step is finished and saved first."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger("posttrain")


@contextmanager
def asked_to_end() -> Iterator[Callable[[], BaseException | None]]:
    """What to raise once the process was asked to end; None before.

    A second request ends it at once. Only the main thread is told of signals; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    asked: list[BaseException] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        if len(asked) > 1:
            raise asked[-1]
        log.warning("asked to end: after this step and its checkpoint; once more ends it at once")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
