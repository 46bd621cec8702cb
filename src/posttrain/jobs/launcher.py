"""Launchers: they start commands on this machine, on Ray or on Slurm, and see and end what they have started."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol


class Process(Protocol):
    """A command that was started, as its starter sees it."""

    def exit_code(self, seconds: float) -> int | None:
        """Waits for the end; returns the exit code, minus a signal's number, or None if it still runs."""

    def output(self) -> str:
        """Returns what it has printed, as far as that is known."""

    def peak_bytes(self) -> int:
        """Returns the most memory that it has had in use, since that was last reset; 0 where that is not known."""

    def kill(self) -> None:
        """Ends it at once, with its children; does nothing if it has ended."""


class Launcher(ExitStack):
    """Starts commands; a context, which at its end leaves the cluster.

    Attributes:
        host: name under which what is started reaches this process; None: all runs on this machine.
        gpus: free bytes of each GPU of this machine to divide the commands among, by its name for CUDA; empty: each
            command's environment says which it has.
    """

    host: str | None = None
    gpus: Mapping[str, int] = {}

    @abstractmethod
    def launch(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Process:
        """Starts a command.

        Args:
            command: the command and its arguments.
            environment: variables that it needs besides those of any process there.
            folder: gets the logs of commands that run elsewhere; every machine sees it.
        """

    def available_bytes(self, processes: Sequence[Process]) -> int | None:
        """Returns the memory that is free, and that of processes which give theirs back; None where it is not known."""
        return None
