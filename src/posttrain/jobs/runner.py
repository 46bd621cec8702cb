"""Runners: they call one function for many tasks, here, in other processes or on other machines, and own the time."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from posttrain.jobs.process import available_cores
from posttrain.jobs.task import Handler, Task, TaskFunction
from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry

SILENCE = 3600.0
"""Seconds without a message after which a task counts as hanging."""


class Runner(ExitStack):
    """Runs tasks; a context, which at its end ends what still runs.

    To write one, derive from this class and define the four methods. A runner decides nothing: it runs the tasks that
    it is given, passes each message on and the answer back, and says how a run ended. Whatever goes wrong in a task is
    an outcome and not an exception of the runner.

    `posttrain.testing.runners.RunnerContract` tests that.

    Attributes:
        workers: number of runs at a time.
        is_simulated: True if the clock is a simulated one, which stands still between calls.
    """

    workers: int = 1
    is_simulated: bool = False

    @abstractmethod
    def start(self, task: Task) -> None:
        """Begins a run; called only while fewer than ``workers`` are in progress."""

    @abstractmethod
    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        """Waits until something happens to a run, and tells the handler.

        Args:
            handler: gets the message or the outcome, or several of them.
            seconds: after which to return without; a runner whose runs cannot be left may take longer, and asks
                `Handler.show_life` whenever a run shows that it makes progress.
        """

    @abstractmethod
    def kill(self, number: int) -> None:
        """Ends a run at once, without an outcome; does nothing where that is not possible."""

    @abstractmethod
    def clock(self) -> float:
        """Returns the time in seconds; only differences count."""

    def available_bytes(self) -> int | None:
        """Returns the memory that all runs may have together, what they have now included; None: any."""
        return None

    def gpu_bytes(self) -> Sequence[int]:
        """Returns the memory of each GPU among which the runs are divided equally; empty: there are none, or any."""
        return ()


RUNNERS: Registry[Callable[[TaskFunction, int, float], Runner]] = Registry(
    "engine",
    "posttrain.runners",
    {
        "inline": "posttrain.jobs.inline:inline",
        "processes": "posttrain.jobs.local:local_runner",
        "ray": "posttrain.jobs.ray:ray_runner",
        "slurm": "posttrain.jobs.slurm:slurm_runner",
    },
)
"""A function of the function that runs a task, the number of workers, and the seconds of silence, by name."""


def check_engine(name: str, workers: int | None = None, section: str = "--") -> None:
    """Raises a `UserError` if there is no such engine, or it cannot have so many workers.

    Args:
        name: of the engine.
        workers: tasks at a time; None: as many as there are cores.
        section: of a config, before the names of keys in errors, such as ``tune.``.
    """
    if name not in RUNNERS:
        raise UserError(f"there is no engine `{name}`", where=f"{section}engine", fix=suggest(name, RUNNERS))
    if workers is not None and workers < 1:
        raise UserError("must be at least 1", where=f"{section}workers")
    if name == "inline" and workers is not None and workers > 1:
        what = f"inline runs one at a time, so it cannot have {workers} workers"
        raise UserError(what, where=f"{section}workers", fix=f"use {section}engine processes")


def open_runner(name: str, function: TaskFunction, workers: int | None = None, silence: float = SILENCE) -> Runner:
    """Opens a runner.

    Args:
        name: its name.
        function: runs a task.
        workers: tasks at a time; by default as many as there are cores.
        silence: seconds without a message after which a task counts as hanging, where it can be ended.

    Raises:
        UserError: as `check_engine`, or the function cannot be sent to another process.
    """
    check_engine(name, workers)
    return RUNNERS.load(name, "--engine")(function, workers or available_cores(), silence)
