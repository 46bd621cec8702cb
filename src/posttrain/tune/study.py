"""A study: its space, its trials, and the database that keeps every event of them.

Each start, report and end of a trial is one attribute of the trial in Optuna's storage, numbered over the whole study.
A study is made of nothing else: its trials and the scheduler's state follow from these events in their order, so that a
study that was killed at any instant is resumed from its last event. States and intermediate values are also written as
Optuna has them, for its dashboard.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import optuna
from optuna.storages import BaseStorage
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial

from posttrain.jobs.memory import UNKNOWN_MEMORY, Memory
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically
from posttrain.tune.budget import Budget, Spent
from posttrain.tune.events import (
    BUDGET_KEY,
    OPTUNA_STATES,
    SPENT_KEY,
    TRIAL_KEY,
    Event,
    EventKind,
    advance,
    attribute_key,
    read_events,
)
from posttrain.tune.goal import Goal, find_study, open_study, stored_goal
from posttrain.tune.storage import (
    STUDY_FILE,
    add_event,
    close_storage,
    describe_location,
    exclusive,
    open_storage,
    show_running,
    storage_errors,
    to_distribution,
    to_optuna,
)
from posttrain.tune.trial import Fork, Report, Trial, TrialState, best_trial, rank

TRIALS_FILE = "trials.jsonl"
"""One line per trial, in a study's folder."""


class Study:
    """The trials of one search, kept in a database; one process at a time works on it.

    Args:
        goal: what is searched; a study of another goal is refused.
        folder: gets ``study.db`` and ``trials.jsonl``; None keeps all in memory.
        url: a PostgreSQL database in place of ``study.db``; ``${NAME}`` in it comes from the environment.
        name: the study's name in the database.

    Attributes:
        trials: all trials, by number.
        best: the best so far, as `best_trial` has it; of several objectives, the trial that is chosen of the front.
        front: with several objectives, the finished trials that none dominates, by number.
        events: what had happened when the study was opened, in its order.
        clock: seconds that the study had been worked on at its last event, or when that was last recorded.

    Raises:
        UserError: the study was begun with another goal, or the database is none.
        LockedError: another process works on it.
    """

    def __init__(
        self,
        goal: Goal,
        *,
        folder: Path | None = None,
        url: str | None = None,
        name: str = "tune",
    ) -> None:
        self.goal, self.folder = goal, folder
        self.space, self.maximize, self.objectives = goal.space, goal.maximize, goal.objectives
        self._location = describe_location(folder, url)
        with ExitStack() as stack:
            self._storage = open_storage(folder, url)
            stack.callback(close_storage, self._storage)
            stack.enter_context(exclusive(self._storage, name))
            with storage_errors(self._location):
                self._id = open_study(self._storage, name, goal, self._location)
                stored = self._storage.get_all_trials(self._id, deepcopy=False)
                spent = Spent(*self._storage.get_study_user_attrs(self._id).get(SPENT_KEY, (0.0, 0)))
            self.trials, self.events, self._next, self.clock = read_events(stored)
            self.clock = max(self.clock, spent.seconds)
            self._ids = [frozen._trial_id for frozen in stored]
            self._runs, self._cuts = (
                [sum(key.startswith(prefix) for key in frozen.system_attrs) for frozen in stored]
                for prefix in ("start:", "cut:")
            )
            self.front = self.objectives.front(self.trials) if len(self.objectives) > 1 else []
            self.best = goal.best_trial(self.trials)
            self._mend(stored)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Writes ``trials.jsonl`` and closes the database."""
        try:
            self.export()
        finally:
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(
        self,
        drawn: Mapping[str, Any],
        resource: int | None = None,
        notes: Mapping[str, Any] | None = None,
        clock: float = 0.0,
        fork: Fork | None = None,
    ) -> Trial:
        """Adds a trial that runs, in one transaction.

        Args:
            drawn: its values.
            resource: the step up to which it runs; None: to its end.
            notes: JSON values to keep with it.
            clock: seconds that the study has been worked on.
            fork: the checkpoint that it continues from.
        """
        settings = self.space.complete(drawn)
        trial = Trial(len(self.trials), settings, dict(drawn), resource=resource, notes=notes or {}, fork=fork)
        content = {"settings": trial.settings, "drawn": trial.drawn, "notes": trial.notes}
        if fork is not None:
            content["fork"] = asdict(fork)
        parameters = {name: self.space.parameters[name] for name in drawn}
        frozen = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=to_optuna(parameters, drawn),
            distributions={name: to_distribution(parameter) for name, parameter in parameters.items()},
            user_attrs={name: value for name, value in trial.settings.items() if name not in drawn},
            system_attrs={TRIAL_KEY: content, attribute_key("start", 0): self._event(clock, {"resource": resource})},
        )
        with storage_errors(self._location):
            self._ids.append(self._storage.create_new_trial(self._id, frozen))
        self._runs.append(1)
        self._cuts.append(0)
        self.trials.append(trial)
        return trial

    def resume(self, number: int, resource: int | None, clock: float = 0.0) -> Trial:
        """Records that the scheduler has a paused trial run again, up to another step."""
        self._runs[number] += 1
        return self._record(number, "start", self._runs[number] - 1, clock, {"resource": resource})

    def report(self, number: int, report: Report, clock: float = 0.0) -> Trial:
        """Records an intermediate value, of a step after those before it."""
        return self._record(number, "report", report.step, clock, asdict(report), (report.step, report.value))

    def cut(self, number: int, seconds: float, tokens: int, clock: float = 0.0) -> Trial:
        """Records what a trial has spent in all, after a run that was killed."""
        trial = self.trials[number]
        costs = {"seconds": max(seconds, trial.seconds), "tokens": max(tokens, trial.tokens)}
        self._cuts[number] += 1
        return self._record(number, "cut", self._cuts[number] - 1, clock, costs)

    def keep_spent(self, spent: Spent) -> None:
        """Records what has been spent, as time passes also where nothing else happens."""
        self.clock = max(self.clock, spent.seconds)
        with storage_errors(self._location):
            self._storage.set_study_user_attr(self._id, SPENT_KEY, list(spent._replace(seconds=self.clock)))

    def keep_budget(self, budget: Budget) -> None:
        """Records the budget, for those who look at the study."""
        with storage_errors(self._location):
            self._storage.set_study_user_attr(self._id, BUDGET_KEY, asdict(budget))

    def end(
        self,
        number: int,
        state: TrialState,
        clock: float = 0.0,
        *,
        value: float | None = None,
        values: Sequence[float] = (),
        error: str = "",
        seconds: float = 0.0,
        tokens: int = 0,
        memory: Memory = UNKNOWN_MEMORY,
        lost: bool = False,
    ) -> Trial:
        """Records how a trial ended, its final value, or the values of all objectives, and what it has spent in all."""
        trial = self.trials[number]
        record = {
            "state": str(state),
            "value": values[0] if values else value,
            "error": error,
            "seconds": max(seconds, trial.seconds),
            "tokens": max(tokens, trial.tokens),
            "memory_bytes": memory.host,
            "gpu_memory_bytes": memory.gpu,
            "others": list(values[1:]),
            "lost": lost,
        }
        return self._record(number, "end", 0, clock, record)

    def set_running(self, number: int, running: bool) -> None:
        """Shows a trial that has not ended as running or paused.

        That is not an event: it follows from the scheduler's decision, the budget or a kill.
        """
        self._replace(replace(self.trials[number], state=TrialState.RUNNING if running else TrialState.PAUSED))

    def export(self) -> None:
        """Writes ``trials.jsonl`` into the folder, if there is one."""
        if self.folder is not None:
            lines = [json.dumps(trial.to_json(), ensure_ascii=False) + "\n" for trial in self.trials]
            write_atomically(self.folder / TRIALS_FILE, "".join(lines).encode())

    def _event(self, clock: float, values: Mapping[str, Any]) -> dict[str, Any]:
        self.clock = max(self.clock, clock)
        self._next += 1
        return {"order": self._next - 1, "clock": self.clock, **values}

    def _record(
        self,
        number: int,
        kind: EventKind,
        key: int,
        clock: float,
        values: Mapping[str, Any],
        shown: tuple[int, float] | None = None,
    ) -> Trial:
        """Writes an event with what Optuna shows of it, but for a state: a kill before that is mended at the opening.

        ``shown`` are step and value of a report.
        """
        with storage_errors(self._location):
            add_event(self._storage, self._ids[number], attribute_key(kind, key), self._event(clock, values), shown)
        return self._replace(advance(self.trials[number], kind, values))

    def _replace(self, trial: Trial) -> Trial:
        before, self.trials[trial.number] = self.trials[trial.number], trial
        if before.state is not trial.state:
            self._show_state(trial)
        self._update_best(trial)
        return trial

    def _update_best(self, trial: Trial) -> None:
        # Not again over all trials with each report: that would take the square of their number.
        best = self.best
        if len(self.objectives) > 1:
            self.front = self.objectives.extend_front(self.front, trial)
            if self.front:
                self.best = self.objectives.choose_trial(self.front)
                return
        if best is not None and best.number == trial.number and rank(trial, self.maximize) > rank(best, self.maximize):
            self.best = best_trial(self.trials, maximize=self.maximize)
        elif trial.latest is not None and (best is None or rank(trial, self.maximize) <= rank(best, self.maximize)):
            self.best = trial

    def _show_state(self, trial: Trial) -> None:
        if not trial.ended:
            with storage_errors(self._location):
                show_running(self._storage, self._ids[trial.number], OPTUNA_STATES[trial.state])
            return
        values = None if trial.latest is None or trial.values is None else list(trial.values)
        with storage_errors(self._location):
            if trial.error:
                self._storage.set_trial_user_attr(self._ids[trial.number], "error", trial.error)
            self._storage.set_trial_state_values(self._ids[trial.number], OPTUNA_STATES[trial.state], values)

    def _mend(self, stored: Sequence[FrozenTrial]) -> None:
        """Shows ends that were written in the instant of a kill."""
        for frozen, trial in zip(stored, self.trials, strict=True):
            if trial.ended and not frozen.state.is_finished():
                self._show_state(trial)


def read_study_events(
    folder: Path | None = None, url: str | None = None, name: str = "tune"
) -> tuple[Goal, list[Trial], list[Event]]:
    """Reads a study without working on it, also while another process does.

    Returns:
        What it searches, its trials by number, and all of its events in their order.

    Raises:
        UserError: there is no such study.
    """
    with _stored_study(folder, url, name) as (storage, study):
        history = read_events(storage.get_all_trials(study._study_id, deepcopy=False))
        return stored_goal(study), history.trials, history.events


def read_left(folder: Path | None = None, url: str | None = None, name: str = "tune") -> str:
    """Returns what is left of a study's budget, that of the last session, such as ``12 trials, 4m 10s left``.

    Nothing of a study whose database is gone.
    """
    if url is None and (folder is None or not (folder / STUDY_FILE).is_file()):
        return ""
    with _stored_study(folder, url, name) as (storage, study):
        if BUDGET_KEY not in study.user_attrs:  # it was killed as it was begun
            return ""
        spent = Spent(*study.user_attrs.get(SPENT_KEY, (0.0, 0)))
        return Budget(**study.user_attrs[BUDGET_KEY]).left(storage.get_n_trials(study._study_id), spent)


@contextmanager
def _stored_study(folder: Path | None, url: str | None, name: str) -> Iterator[tuple[BaseStorage, FrozenStudy]]:
    location = describe_location(folder, url)
    missing = UserError("holds no study", where=location, fix="begin one with posttrain tune CONFIG.yaml --out DIR")
    if url is None and (folder is None or not (folder / STUDY_FILE).is_file()):
        raise missing
    with ExitStack() as stack:
        if url is None and folder is not None and not os.access(folder, os.W_OK):
            # SQLite writes beside a file to read it.
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-tune-")))
            for file in folder.glob(f"{STUDY_FILE}*"):
                shutil.copyfile(file, copy / file.name)
            folder = copy
        storage = open_storage(folder, url)
        stack.callback(close_storage, storage)
        with storage_errors(location):
            study = find_study(storage, name)
            if study is None:
                raise missing
            yield storage, study
