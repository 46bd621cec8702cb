"""What the pages of the loop show besides the report: alarms, and trainings compared side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.loop.state import RoundState
from posttrain.report.charts.bars import format_seconds
from posttrain.report.formatting import metric_name, metric_text
from posttrain.report.section import Section, Table, Text
from posttrain.store.errors import shorten, to_line
from posttrain.store.message import Message
from posttrain.store.rows import Run
from posttrain.store.workspace import Workspace
from posttrain.train.curves import TrainingCurves, flat_settings, read_round_training
from posttrain.train.report import compared_charts, differing_settings, unique_names
from posttrain.web.loop_report import LoopReport
from posttrain.web.translations import Translator

MOST_COMPARED = 8
"""Training runs side by side, at most: as many colours as can be told apart."""


def loop_alarms(
    workspace: Workspace, report: LoopReport, quality: Mapping[str, Any] | None, translate: Translator
) -> list[str]:
    """Returns a sentence for each thing that needs somebody: damage, a failed stage, and faults of the labelling."""
    rollback = report.state["rollback"]
    # Who rolled back by hand knows it.
    by_gate = report.rollback if rollback and rollback["round"] is not None else ""
    alarms = [translate.line(text) for text in (report.damage, by_gate) if text]
    runs = workspace.metadata.runs()
    # An earlier failure was overcome.
    if runs and runs[-1].status == "failed" and runs[-1].error != "interrupted":
        error = shorten(to_line(runs[-1].error or ""), 300)
        alarms.append(translate("loop.failed", stage=runs[-1].stage, error=error))
    alarms += [translate.line(finding["sentence"]) for finding in (quality or {}).get("alarms", [])]
    return alarms


@dataclass(frozen=True)
class TrainingRun:
    """A training of the loop: its run, the round whose candidate it made, and that round's results."""

    run: Run
    name: str
    round: int | None
    metrics: Mapping[str, float]
    decision: str | None


def training_runs(workspace: Workspace) -> list[TrainingRun]:
    """Returns the trainings, newest first; of several attempts under one key the last."""
    candidates = {entry.candidate: entry for entry in workspace.metadata.rounds() if entry.candidate}
    attempts: dict[str, Run] = {}
    for run in workspace.metadata.runs(stage="train"):
        attempts.pop(run.key, None)
        attempts[run.key] = run
    listed = []
    for run in reversed(attempts.values()):
        entry = candidates.get(run.output) if run.output else None
        state = RoundState.from_row(entry) if entry else RoundState()
        number = entry.number if entry else run.round
        name = Message("round {number}", number=number)
        listed.append(TrainingRun(run, name, number, state.metrics or {}, state.action))
    return listed


def live_training(workspace: Workspace) -> tuple[TrainingRun, TrainingCurves] | None:
    """Returns the training in progress, or the last one, as far as it is recorded."""
    for training in training_runs(workspace)[:1]:
        curves = read_round_training(workspace, training.run, training.name)
        if curves is not None and len(curves.steps):
            return training, curves
    return None


def compare_runs(workspace: Workspace, trainings: Sequence[TrainingRun]) -> list[Section]:
    """Compares trainings: results, curves over each other, and the settings that differ."""
    names = unique_names([training.name for training in trainings])
    curves = [
        read_round_training(workspace, training.run, name) for training, name in zip(trainings, names, strict=True)
    ]
    drawn = [training for training in curves if training is not None and len(training.steps)]
    missing = [name for name, training in zip(names, curves, strict=True) if training is None]
    lost = [Text(Message("The curves of {name} are not at hand.", name=name), "note") for name in missing]
    return [
        Section(Message("Results"), [Table((Message("result"), *names), list(_results(trainings))), *lost]),
        Section(Message("Curves"), [compared_charts(drawn)]),
        differing_settings(names, [dict(_settings(training.run)) for training in trainings]),
    ]


def _settings(run: Run) -> Iterator[tuple[str, str]]:
    """Yields all that decides a training: inputs, settings and seed, with dotted names."""
    yield from run.inputs.items()
    yield from flat_settings(run.config)
    yield "seed", str(run.seed)
    yield "posttrain", run.code_version


def _results(trainings: Sequence[TrainingRun]) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(name for training in trainings for name in training.metrics):
        values = [training.metrics.get(name) for training in trainings]
        shown = ("–" if value is None else metric_text(name, value) for value in values)
        yield metric_name(name), *shown
    seconds = [training.run.seconds for training in trainings]
    yield Message("training time"), *("–" if value is None else format_seconds(value) for value in seconds)
