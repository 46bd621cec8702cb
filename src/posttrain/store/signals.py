"""Handles the signals that end a process: one way for commands, trainings and the server."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

# SIGHUP is missing on Windows.
END_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Ctrl-C, the request of a supervisor, and the loss of the terminal."""


class _Deferral:
    """The depth of nested `defer_signals` in the main thread, and the call to make when the outermost ends."""

    depth = 0
    pending: Callable[[], None] | None = None


_deferral = _Deferral()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Handles a signal of `handle_signals` that arrives in this context at its end.

    It is for work that an exception between two of its lines would leave half done. Of several signals the last counts.
    Does nothing outside of the main thread, the only one that signals interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Not by a signal mask: another thread would take the signal, and programs started here would inherit the mask.
    _deferral.depth += 1
    try:
        yield
    finally:
        _deferral.depth -= 1
        if not _deferral.depth and _deferral.pending is not None:
            handle, _deferral.pending = _deferral.pending, None
            handle()


@contextmanager
def handle_signals(numbers: list[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles signals until the context ends; those that the caller ignores, as ``nohup`` does, stay ignored.

    Does nothing outside of the main thread, the only one to which Python delivers signals.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if _deferral.depth:
            _deferral.pending = partial(handler, number, frame)
        else:
            handler(number, frame)

    in_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in numbers if in_main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
