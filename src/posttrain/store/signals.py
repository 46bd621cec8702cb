"""Handles the signals that end a process: one way for commands, trainings and the server."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# SIGHUP is missing on Windows.
END_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Ctrl-C, the request of a supervisor, and the loss of the terminal."""


@contextmanager
def handle_signals(numbers: list[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles signals until the context ends; those that the caller ignores, as ``nohup`` does, stay ignored.

    Does nothing outside of the main thread, the only one to which Python delivers signals.
    """
    in_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in numbers if in_main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
