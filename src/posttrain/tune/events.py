"""The events of a study, and how they are kept as attributes of Optuna's trials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import optuna
from optuna.trial import FrozenTrial

from posttrain.tune.trial import Fork, Report, Trial, TrialState

EventKind = Literal["start", "report", "end"]

TRIAL_KEY = "trial"
"""The attribute with a trial's settings, drawn values, notes and fork."""

EXCLUDED_KEY = "excluded"
"""The attribute with the reason why a trial of an earlier space does not count any more."""

OPTUNA_STATES = {
    TrialState.RUNNING: optuna.trial.TrialState.RUNNING,
    # Optuna has no word for it. A paused trial must not be a finished one, as those cannot be changed any more.
    TrialState.PAUSED: optuna.trial.TrialState.WAITING,
    TrialState.FINISHED: optuna.trial.TrialState.COMPLETE,
    TrialState.STOPPED: optuna.trial.TrialState.PRUNED,
    TrialState.FAILED: optuna.trial.TrialState.FAIL,
}


@dataclass(frozen=True)
class Event:
    """Something that happened to a trial.

    Attributes:
        kind: ``start`` of a run, ``report``, or ``end``.
        order: its number in the study, from 0.
        clock: seconds that the study had been worked on.
        values: of a start its ``resource``; of a report those of a `Report`; of an end ``state``, ``value``,
            ``others``, ``error``, ``seconds``, ``tokens``, ``memory_bytes`` and ``gpu_memory_bytes``.
        trial: the trial after the event.
    """

    kind: EventKind
    order: int
    clock: float
    values: Mapping[str, Any]
    trial: Trial


def attribute_key(kind: EventKind, number: int) -> str:
    """Returns the attribute of an event: the ``number`` is that of the run, or the step of the report."""
    return kind if kind == "end" else f"{kind}:{number}"


def advance(trial: Trial, kind: EventKind, values: Mapping[str, Any]) -> Trial:
    """Returns a trial after an event."""
    if kind == "start":
        return replace(trial, resource=values["resource"], state=TrialState.RUNNING)
    if kind == "report":
        others = tuple(values.get("others", ()))
        report = Report(values["step"], values["value"], values["seconds"], values["tokens"], others)
        reports = (*trial.reports, report)
        return replace(trial, reports=reports, seconds=report.seconds, tokens=report.tokens)
    return replace(
        trial,
        **{name: values[name] for name in ("value", "error", "seconds", "tokens", "memory_bytes")},
        gpu_memory_bytes=values.get("gpu_memory_bytes", 0),
        others=tuple(values.get("others", ())),
        state=TrialState(values["state"]),
    )


def read_events(stored: Sequence[FrozenTrial]) -> tuple[list[Trial], list[Event]]:
    """Returns the trials as they are now, by number, and all events in their order."""
    trials: list[Trial] = []
    raw: list[tuple[int, EventKind, int, Mapping[str, Any]]] = []
    for frozen in stored:
        attributes = frozen.system_attrs
        content = dict(attributes[TRIAL_KEY])
        fork = content.pop("fork", None)
        trials.append(Trial(frozen.number, **content, fork=None if fork is None else Fork(**fork)))
        if EXCLUDED_KEY in attributes:
            trials[-1] = replace(trials[-1], state=TrialState.FAILED, error=attributes[EXCLUDED_KEY])
            continue
        for kind in ("start", "report", "end"):
            prefix = attribute_key(kind, 0).removesuffix("0")
            raw += [
                (values["order"], kind, frozen.number, values)
                for key, values in attributes.items()
                if key.startswith(prefix)
            ]
    events: list[Event] = []
    for order, kind, number, values in sorted(raw, key=lambda item: item[0]):
        trials[number] = advance(trials[number], kind, values)
        events.append(Event(kind, order, values["clock"], values, trials[number]))
    for frozen in stored:
        trial = trials[frozen.number]
        if frozen.state is optuna.trial.TrialState.WAITING and not trial.ended:
            trials[frozen.number] = replace(trial, state=TrialState.PAUSED)
    return trials, events
