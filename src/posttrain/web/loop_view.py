"""What the pages of the loop show: tiles, alarms, decisions, and training runs compared side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.inspect.champion import RollbackReport
from posttrain.inspect.status import status
from posttrain.loop.batch_counts import BatchCounts
from posttrain.loop.state import RoundState
from posttrain.report import formatting
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.curve import CurveStyle, compared_curves
from posttrain.store.errors import shorten, to_line
from posttrain.store.rows import Run
from posttrain.store.workspace import Workspace
from posttrain.web.page import Tile
from posttrain.web.report_data import Report
from posttrain.web.training_reader import TrainingCurves, read_round_training
from posttrain.web.training_view import MEASURES
from posttrain.web.translations import Translator

MOST_COMPARED = 8
"""Training runs side by side, at most: as many colours as can be told apart."""

_COMPARED = ("loss", "grad_norm", "lr", "tokens_per_second")


def loop_tiles(report: Report, state: Mapping[str, Any], translate: Translator) -> list[Tile]:
    """Builds the headline numbers: value, name and remark."""
    tiles = []
    if report.champion and report.metric in report.champion.metrics:
        value = formatting.metric_text(report.metric, report.champion.metrics[report.metric])
        name = translate("loop.champion_metric", metric=translate.line(formatting.metric_name(report.metric)))
        tiles.append((value, name, translate("loop.since_round", round=report.champion.round)))
    done, wanted = report.rounds_done, state["rounds_wanted"]
    tiles.append((str(done) if wanted is None else f"{done} / {wanted}", translate("loop.rounds"), ""))
    counts = report.batches
    tiles.append((f"{counts.learned:,}", translate("loop.labels"), translate("loop.asked", count=f"{counts.asked:,}")))
    deployed, refused, back = (
        sum(row.decision == kind for row in report.rounds) for kind in ("deploy", "refuse", "rollback")
    )
    remark = translate("loop.refused", count=refused)
    remark += translate("site.comma") + translate("loop.withdrawn", count=back) if back else ""
    tiles.append((str(deployed), translate("loop.deployed"), remark))
    return tiles


def loop_alarms(
    workspace: Workspace, report: Report, quality: Mapping[str, Any] | None, translate: Translator
) -> list[str]:
    """Returns a sentence for each thing that needs somebody: damage, a failed stage, and faults of the labelling."""
    alarms = list(report.damage)
    runs = workspace.metadata.runs()
    # An earlier failure was overcome.
    if runs and runs[-1].status == "failed" and runs[-1].error != "interrupted":
        error = shorten(to_line(runs[-1].error or ""), 300)
        alarms.append(translate("loop.failed", stage=runs[-1].stage, error=error))
    if report.rollback is not None and report.rollback.round is not None:
        alarms.append(rollback_text(report.rollback, translate))
    alarms += [translate.line(finding["sentence"]) for finding in (quality or {}).get("alarms", [])]
    return alarms


def rollback_text(rollback: RollbackReport, translate: Translator) -> str:
    """Says who rolled back from which model to which, and why."""
    source, target = (
        id if number is None else translate("loop.model_of", round=number) if number else translate("loop.base_model")
        for number, id in ((rollback.source_round, rollback.source), (rollback.target_round, rollback.target))
    )
    key = "loop.rolled_back_by_hand" if rollback.round is None else "loop.rolled_back"
    text = translate(key, round=rollback.round, source=source, target=target)
    return f"{text} {rollback.reason}".rstrip()


def batch_texts(counts: BatchCounts, translate: Translator) -> list[tuple[str, str]]:
    """Returns names and numbers of what became of a batch: asked, learned, and all else that is not 0."""
    rows = [("asked", counts.asked), ("answered", counts.answered), ("learned", counts.learned)]
    rest = (("duplicates", counts.duplicates), ("skipped", counts.skipped), ("left", counts.left))
    named = [(translate(f"batch.{name}"), f"{count:,}") for name, count in (*rows, *(row for row in rest if row[1]))]
    reasons = [(translate("batch.rejected", reason=translate.line(reason)), n) for reason, n in counts.rejected.items()]
    reasons += [(translate("batch.skip", reason=reason), n) for reason, n in counts.skips.items()]
    return [*named, *((name, f"{count:,}") for name, count in reasons)]


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
        listed.append(TrainingRun(run, f"round {number}", number, state.metrics or {}, state.action))
    return listed


def live_training(workspace: Workspace) -> tuple[TrainingRun, TrainingCurves] | None:
    """Returns the training in progress, or the last one, as far as it is recorded."""
    for training in training_runs(workspace)[:1]:
        curves = read_round_training(workspace, training.run, training.name)
        if curves is not None and len(curves.steps):
            return training, curves
    return None


@dataclass(frozen=True)
class Comparison:
    """Trainings side by side.

    Attributes:
        names: Names of the trainings, unique.
        charts: Their curves, one chart for each measure.
        settings: Rows of the settings that differ: name, and the value of each.
        results: Rows of the results: name, and the value of each.
        missing: Names of the trainings whose curves were not kept.
    """

    names: tuple[str, ...]
    charts: tuple[Chart, ...]
    settings: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...]


def compare_runs(workspace: Workspace, trainings: Sequence[TrainingRun]) -> Comparison:
    """Compares trainings: curves over each other, settings that differ, results."""
    names = _unique([training.name for training in trainings])
    curves = [
        read_round_training(workspace, training.run, name) for training, name in zip(trainings, names, strict=True)
    ]
    drawn = [training for training in curves if training is not None and len(training.steps)]
    styles: dict[str, tuple[str, CurveStyle]] = {key: (title, style) for key, title, style in MEASURES}
    charts = [
        compared_curves([(one.name, one.steps, one.values[key]) for one in drawn], *styles[key]) for key in _COMPARED
    ]
    for name in dict.fromkeys(name for one in drawn for name in one.objective):
        measured = [(one.name, one.steps, one.objective[name]) for one in drawn if name in one.objective]
        charts.append(compared_curves(measured, name, CurveStyle(formatting.number_text, zero=False)))
    flat = [dict(_settings(training.run)) for training in trainings]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    differing = [(key, *(settings.get(key, "–") for settings in flat)) for key in keys]
    return Comparison(
        names=tuple(names),
        charts=tuple(replace(chart, fixed_names=True) for chart in charts if chart),
        settings=tuple(row for row in differing if len(set(row[1:])) > 1),
        results=tuple(_results(trainings)),
        missing=tuple(name for name, training in zip(names, curves, strict=True) if training is None),
    )


def _unique(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names, 1)]


def _settings(run: Run) -> Iterator[tuple[str, str]]:
    """Yields all that decides a training: inputs, settings and seed, with dotted names."""
    yield from run.inputs.items()
    yield from _flat("", run.config)
    yield "seed", str(run.seed)
    yield "posttrain", run.code_version


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, shorten(str(value), 200)


def _results(trainings: Sequence[TrainingRun]) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(name for training in trainings for name in training.metrics):
        values = [training.metrics.get(name) for training in trainings]
        shown = ("–" if value is None else formatting.metric_text(name, value) for value in values)
        yield formatting.metric_name(name), *shown
    seconds = [training.run.seconds for training in trainings]
    yield "training time", *("–" if value is None else formatting.duration_text(value) for value in seconds)


def read_state(workspace: Workspace, config: Any) -> dict[str, Any]:
    """Returns the loop's state, with the seconds of its stages as texts."""
    state = status(workspace, config)
    for stage in state["stages"]:
        stage["time"] = formatting.duration_text(stage["seconds"]) if stage["seconds"] else ""
    return state
