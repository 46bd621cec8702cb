"""A trial as the function sees it that runs it: its settings, its folder, and how it reports."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain.tune.objectives import Measured
from posttrain.tune.schedulers.base import Decision

_MAX_STEP = 2**31 - 1
"""What a column of Optuna's tables holds in PostgreSQL."""


class TrialInterrupted(BaseException):
    """Raised by `TrialContext.report` and `TrialContext.show_life` where the trial pauses or stops; ends the function.

    It is not an `Exception`, so that a function which handles its own errors does not continue by mistake.
    """


class Infeasible(Exception):
    """Raised by a trial's function whose settings break a limit, such as a model that is too large, with the reason.

    The trial ends as a failed one, whose settings samplers avoid unless they look at no value, such as ``random``;
    however many there are, the study continues.
    """


class TrialContext:
    """The argument of a study's function: settings, a folder, and reports.

    ``trial["lr"]`` is a setting. A function that reports intermediate values saves its state into ``folder`` *before*
    each report: a report may end the run (it raises `TrialInterrupted`), and a paused trial is run again later, by a
    new call with the same folder. It then continues from what it finds there, and first reports that again, as a kill
    may have come between the checkpoint and its report; a step that is known already counts once. One that keeps no
    state begins again. In a population a new trial may find a copy of another's folder, and continues from it in the
    same way, with its own settings.

    Attributes:
        number: the trial's number.
        settings: all values, by name.
        folder: for its checkpoints; kept until the trial has ended, and that of the best one for good.
        start: the step of its last report in an earlier run; in the first 0, or that of the checkpoint in ``folder``.
        resource: the step up to which this run goes; None: to its end. A function that reports need not look at it.
        seed: for the function's own random numbers; the same in each run of the trial.
    """

    def __init__(
        self,
        number: int,
        settings: Mapping[str, Any],
        folder: Path,
        start: int,
        resource: int | None,
        seed: int,
        report: Callable[[int, Measured, int], Decision],
        show_life: Callable[[], bool] = lambda: True,
    ) -> None:
        self.number, self.settings, self.folder = number, settings, folder
        self.start, self.resource, self.seed = start, resource, seed
        self._report, self._show_life = report, show_life

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def report(self, step: int, value: Measured, *, tokens: int = 0) -> None:
        """Reports an intermediate value, or one of each objective.

        Args:
            step: the resource so far, from 1, such as the number of epochs; greater than in the report before.
            value: of the objective; of several a sequence in their order, or a mapping by name.
            tokens: processed since the report before, for budgets in tokens.

        Raises:
            TrialInterrupted: the trial pauses or stops.
            ValueError: the step is not a positive integer, or the value of an objective is missing.
        """
        if step != int(step) or not 1 <= step <= _MAX_STEP:
            raise ValueError(f"a step is a positive integer up to {_MAX_STEP:,}, not {step}")
        if self._report(int(step), value, int(tokens)) is not Decision.CONTINUE:
            raise TrialInterrupted

    def show_life(self) -> None:
        """Says that the trial makes progress, where the next report is far; costs nothing to call after each step.

        A trial in another process that is silent for an hour, or as long as `minimize` says, counts as hanging. One in
        the study's own process is ended here once the time of the budget is over.

        Raises:
            TrialInterrupted: the trial pauses; it continues from its checkpoint if the budget grows.
        """
        if not self._show_life():
            raise TrialInterrupted
