"""The process around a verb: its standard streams, and the signals that end it."""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from posttrain.store.signals import END_SIGNALS, handle_signals

STOP_CODES = {128 + number for number in END_SIGNALS}
"""Exit codes of a command that a signal stopped, as shells count them: 130, 143, 129."""

BROKEN_PIPE_CODE = 141
"""Exit code where the reader of the output went away: 128 + SIGPIPE."""

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def prepare_streams() -> None:
    """Makes standard output and error take any character, and exist."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, as `>&-` does
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            # An ASCII locale has no `→`: escaped is better than an error after the work is done.
            stream.reconfigure(errors="backslashreplace")


def is_output_refusal(error: BaseException) -> bool:
    """Returns True for the error of a standard stream whose disk or device takes no more."""
    # Errors of files name their file; those of an open stream do not.
    return isinstance(error, OSError) and error.filename is None and error.errno in _REFUSALS


def discard_output() -> None:
    """Sends what is still to be printed nowhere, as Python would fail again on the rest when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Ends the work on a signal, so that locks and files are tidied up.

    SIGTERM and SIGHUP raise ``SystemExit(128 + number)``, Ctrl-C raises ``KeyboardInterrupt`` as ever.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with handle_signals(END_SIGNALS, stop):
        yield
