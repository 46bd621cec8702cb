"""Log lines that show the progress of a study: trials that end, how many have, the best so far, and the budget left."""

import logging
import time
from collections.abc import Callable, Sequence

from posttrain.store.message import counted
from posttrain.tune.budget import Budget, Spent, format_seconds
from posttrain.tune.objectives import Objectives
from posttrain.tune.study import Study
from posttrain.tune.trial import Trial, TrialState

log = logging.getLogger("posttrain")

_SILENT_SECONDS = 60.0  # after which a line is printed though nothing has happened

_EVERY_SECONDS = 2.0  # between lines, unless there is a new best: thousands of short trials are nothing to read


class ProgressLines:
    """Logs a line for trials that end; to be called with each trial that has reported or ended.

    `show_time`, which is called in between, logs one per minute where nothing happens.

    Args:
        study: the study.
        budget: its budget.
        spent: returns what the study has spent.
    """

    def __init__(self, study: Study, budget: Budget, spent: Callable[[], Spent]) -> None:
        self._study, self._budget, self._spent = study, budget, spent
        self._last = time.monotonic() - _EVERY_SECONDS
        self._best = study.best

    def __call__(self, trial: Trial) -> None:
        """Logs a line for a new best, and otherwise at most every two seconds."""
        best = self._study.best
        is_better = best is not None and (self._best is None or best.number != self._best.number)
        self._best = best
        now = time.monotonic()
        if not (is_better or now - self._last >= _EVERY_SECONDS):
            return
        self._last = now
        done = sum(other.ended for other in self._study.trials)
        description = _describe(trial, self._study.objectives)
        log.info("  %s · %s done · %s · %s", description, f"{done:,}", self._best_text, self._left())

    def show_time(self, running: int) -> None:
        """Logs a line if there was none for a minute: how many trials run, the best so far, and what is left."""
        now = time.monotonic()
        if not running or now - self._last < _SILENT_SECONDS:
            return
        self._last = now
        spent = self._spent()
        to_go = self._budget.seconds_to_go(len(self._study.trials) - running, spent)
        known = to_go is not None and to_go > 0 and self._budget.seconds is None
        estimate = f", about {format_seconds(to_go or 0.0)} to go" if known else ""
        counts = f"{counted(running, 'trial')} running, {format_seconds(spent.seconds)} so far"
        log.info("  %s · %s · %s%s", counts, self._best_text, self._left(), estimate)

    @property
    def _best_text(self) -> str:
        return describe_best(self._study.best, self._study.objectives, self._study.front)

    def _left(self) -> str:
        return self._budget.left(len(self._study.trials), self._spent())


def describe_current(current: Trial, best: Trial, objectives: Objectives) -> str:
    """Formats what the config's own settings came to beside the best, such as ``the config's own settings 0.45``."""
    if current.number == best.number:
        return "the config's own settings, which nothing beat"
    if current.latest is None:
        return f"the config's own settings {current.state}"
    at = "" if current.state is TrialState.FINISHED else f" at step {current.step}"
    return f"the config's own settings {_values_text(current, objectives)}{at}"


def _describe(trial: Trial, objectives: Objectives) -> str:
    if trial.state is TrialState.FAILED:
        return f"trial {trial.number} failed: {trial.error}"
    parts = [f"trial {trial.number}", *([str(trial.state)] if trial.ended else [])]
    if trial.step and trial.state is not TrialState.FINISHED:
        parts.append(f"at step {trial.step}")
    value = "" if trial.latest is None else f": {_values_text(trial, objectives)}"
    return f"{' '.join(parts)}{value} ({format_seconds(trial.seconds)})"


def _values_text(trial: Trial, objectives: Objectives) -> str:
    values = trial.latest_values or ()
    return f"{trial.latest:.6g}" if len(values) < 2 else objectives.describe(values)


def describe_best(best: Trial | None, objectives: Objectives, front: Sequence[Trial] = ()) -> str:
    """Formats the best trial, such as ``best 0.4123 (trial 7)``; with several objectives the one that was chosen, such
    as ``front of 5 trials, of which trial 7: loss 0.4123, seconds 12.5``."""
    if best is None or best.latest is None:
        return "no value yet"
    if front:
        return (
            f"front of {counted(len(front), 'trial')}, of which trial {best.number}: {_values_text(best, objectives)}"
        )
    at = "" if best.state is TrialState.FINISHED else f" at step {best.step}"
    return f"best {_values_text(best, objectives)}{at} (trial {best.number})"
