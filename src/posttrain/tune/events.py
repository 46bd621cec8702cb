"""The events of a study, and how they are kept as attributes of Optuna's trials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import optuna
from optuna.trial import FrozenTrial

from posttrain.tune.trial import Fork, Report, Trial, TrialState

EventKind = Literal["start", "report", "cut", "end"]

TRIAL_KEY = "trial"
"""The attribute with a trial's settings, drawn values, notes and fork."""

SPENT_KEY = "spent"
"""The attribute of a study with what it has spent, as a list of the fields of `Spent`."""

BUDGET_KEY = "budget"
"""The attribute of a study with the budget of the last session."""

OPTUNA_STATES = {
    TrialState.RUNNING: optuna.trial.TrialState.RUNNING,
    # Optuna has no word for it. A paused trial must not be a finished one, as those cannot be changed any more.
    TrialState.PAUSED: optuna.trial.TrialState.WAITING,
    TrialState.FINISHED: optuna.trial.TrialState.COMPLETE,
    TrialState.STOPPED: optuna.trial.TrialState.PRUNED,
    TrialState.FAILED: optuna.trial.TrialState.FAIL,
}


_END_VALUES = ("value", "error", "seconds", "tokens", "memory_bytes", "gpu_memory_bytes", "lost")


@dataclass(frozen=True)
class Event:
    """Something that happened to a trial.

    Attributes:
        kind: ``start`` of a run, ``report``, ``cut``, which is a run that was killed, or ``end``.
        order: its number in the study, from 0.
        clock: seconds that the study had been worked on.
        values: of a start its ``resource``; of a report those of a `Report`; of a cut ``seconds`` and ``tokens`` of the
            trial in all; of an end ``state``, ``value``, ``others``, ``error``, ``seconds``, ``tokens``,
            ``memory_bytes``, ``gpu_memory_bytes`` and ``lost``.
        trial: the trial after the event.
    """

    kind: EventKind
    order: int
    clock: float
    values: Mapping[str, Any]
    trial: Trial


class History(NamedTuple):
    """The events of a study, and what follows from them.

    Attributes:
        trials: as they are now, by number.
        events: all events, in their order.
        next: the order of the next event.
        clock: seconds that the study had been worked on at the last event.
    """

    trials: list[Trial]
    events: list[Event]
    next: int
    clock: float


def attribute_key(kind: EventKind, number: int) -> str:
    """Returns the attribute of an event: the ``number`` is that of the run or the cut, or the step of the report."""
    return kind if kind == "end" else f"{kind}:{number}"


def advance(trial: Trial, kind: EventKind, values: Mapping[str, Any]) -> Trial:
    """Returns a trial after an event."""
    if kind == "start":
        return replace(trial, resource=values["resource"], state=TrialState.RUNNING)
    if kind == "report":
        others = tuple(values["others"])
        report = Report(values["step"], values["value"], values["seconds"], values["tokens"], others)
        reports = (*trial.reports, report)
        return replace(trial, reports=reports, seconds=report.seconds, tokens=report.tokens)
    if kind == "cut":
        return replace(trial, seconds=values["seconds"], tokens=values["tokens"])
    return replace(
        trial,
        **{name: values[name] for name in _END_VALUES},
        others=tuple(values["others"]),
        state=TrialState(values["state"]),
    )


def read_events(stored: Sequence[FrozenTrial]) -> History:
    """Returns the history of a study, given its trials as Optuna has them."""
    trials: list[Trial] = []
    raw: list[tuple[int, EventKind, int, Mapping[str, Any]]] = []
    for frozen in stored:
        content = dict(frozen.system_attrs[TRIAL_KEY])
        fork = content.pop("fork", None)
        trials.append(Trial(frozen.number, **content, fork=None if fork is None else Fork(**fork)))
        for kind in ("start", "report", "cut", "end"):
            prefix = attribute_key(kind, 0).removesuffix("0")
            raw += [
                (values["order"], kind, frozen.number, values)
                for key, values in frozen.system_attrs.items()
                if key.startswith(prefix)
            ]
    raw.sort(key=lambda item: item[0])
    events: list[Event] = []
    for order, kind, number, values in raw:
        trials[number] = advance(trials[number], kind, values)
        events.append(Event(kind, order, values["clock"], values, trials[number]))
    for frozen in stored:
        if frozen.state is optuna.trial.TrialState.WAITING and not trials[frozen.number].ended:
            trials[frozen.number] = replace(trials[frozen.number], state=TrialState.PAUSED)
    order, clock = (raw[-1][0] + 1, raw[-1][3]["clock"]) if raw else (0, 0.0)
    return History(trials, events, order, clock)
