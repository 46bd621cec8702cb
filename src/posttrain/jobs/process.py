"""Processes of this machine that are ended with all that they have started, and commands with limits."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any


def available_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    # Not `cpu_count` where there is better: in a container it counts the host's cores.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ProcessGroup:
    """A process in a session of its own, on a POSIX system.

    When it has ended, by itself or by a signal, what it has started is killed: data workers would keep their memory
    otherwise.

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
            _kill_group(self._process)


@dataclass(frozen=True)
class Completed:
    """A command that has ended.

    Attributes:
        code: exit code, negative for a signal; None if its time was over and it was ended.
        output: what it wrote to standard output.
        errors: what it wrote to standard error.
    """

    code: int | None
    output: bytes
    errors: bytes

    @property
    def last_error(self) -> str:
        """The last line that it wrote to standard error; empty if there is none."""
        lines = self.errors.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def run_command(
    command: Sequence[str],
    *,
    input: bytes = b"",
    seconds: float | None = None,
    cpu_seconds: int | None = None,
    memory_bytes: int | None = None,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Completed:
    """Runs a command to its end, in a session of its own.

    Args:
        command: the command and its arguments.
        input: what it reads from standard input.
        seconds: after which it is ended, with all that it has started; None: it may take any time.
        cpu_seconds: the processor's time that it may take, as the clock's depends on what else runs; on Linux.
        memory_bytes: the address space that it may have; on Linux.
        folder: that it runs in; None: that of this process.
        environment: variables that it gets besides those of this process.

    Raises:
        OSError: it cannot be started.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=folder,
        env={**os.environ, **(environment or {})},
    ) as process:
        try:
            _limit(process.pid, cpu_seconds, memory_bytes)
            output, errors = process.communicate(input, seconds)
        except subprocess.TimeoutExpired as late:
            _kill_group(process)
            return Completed(None, late.output or b"", late.stderr or b"")
        except BaseException:  # such as Ctrl-C, which does not reach a session of its own
            _kill_group(process)
            raise
    return Completed(process.returncode, output, errors)


def _limit(pid: int, cpu_seconds: int | None, memory_bytes: int | None) -> None:
    with suppress(ImportError, AttributeError, OSError):  # not Linux, or the process has ended
        import resource

        # Not by a function between fork and exec, which may deadlock where this process has threads.
        prlimit: Any = resource.prlimit  # type: ignore[attr-defined,unused-ignore]
        if cpu_seconds is not None:
            prlimit(pid, resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
            prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        if memory_bytes is not None:
            prlimit(pid, resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows
            process.kill()
