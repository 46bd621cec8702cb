"""Runs tasks one after another in this process."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from posttrain.jobs.runner import Runner
from posttrain.jobs.task import Handler, Task, TaskFunction, run_task


class InlineRunner(Runner):
    """Calls the function in this process.

    Args:
        function: runs a task.
    """

    def __init__(self, function: TaskFunction) -> None:
        super().__init__()
        self._function = function
        self._tasks: list[Task] = []

    def start(self, task: Task) -> None:
        self._tasks.append(task)

    def wait(self, handler: Handler, seconds: float | None = None) -> None:
        task = self._tasks.pop(0)

        def carry(method: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return method(task.number, *arguments)
            except Exception as error:
                raise _HandlerError(error) from error

        try:
            outcome = run_task(self._function, task, partial(carry, handler.message), partial(carry, handler.show_life))
        except _HandlerError as wrapper:
            raise wrapper.error from None
        handler.ended(task.number, outcome)

    def kill(self, number: int) -> None:
        """Does nothing: a call cannot be ended from outside; it is when it shows life."""

    def clock(self) -> float:
        return time.monotonic()


class _HandlerError(BaseException):
    """Carries an error of the handler, such as of a full disk, through the task's function, whose own it is not."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def inline(function: TaskFunction, workers: int, silence: float) -> Runner:
    """Returns the runner of this process, which has one worker and cannot end a call."""
    return InlineRunner(function)
