"""A process that is ended with all that it has started: its data workers would keep their memory otherwise."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO


class ProcessGroup:
    """A process in a session of its own, on a POSIX system.

    When it has ended, by itself or by a signal, what it has started is killed.

    Args:
        command: of the process.
        log: gets what it prints.
        folder: that it runs in; None: that of this process.
        environment: variables that it gets besides those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: IO[bytes],
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, **(environment or {})},
        )
        self._is_killed = False

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def wait(self, seconds: float | None = None) -> int | None:
        """Waits for its end; returns the exit code, negative for a signal, or None if it still runs by then."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._kill_group()
        return code

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        self._kill_group()
        self._process.wait()

    def _kill_group(self) -> None:
        # Once: the number of a group that has ended may be that of another later.
        if not self._is_killed:
            self._is_killed = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
