"""Builds the charts of a study from its trials: history, curves, slices, importance."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from posttrain.report.charts.bars import bars, format_seconds
from posttrain.report.charts.chart import Chart, Option, ticks, truncate, value_axis
from posttrain.report.charts.curve import downsample
from posttrain.report.formatting import number_text, percent_text
from posttrain.tune.events import Event
from posttrain.tune.goal import Goal
from posttrain.tune.importance import Importance
from posttrain.tune.parameters import Choice, Float, Int, Parameter
from posttrain.tune.report.trial_charts import (
    Measure,
    TrialCurve,
    TrialPoint,
    trial_curves,
    trial_points,
)
from posttrain.tune.trial import Trial, TrialState, best_trial

_HISTORY = 1000  # points of a history
_SLICES, _FEWEST = 6000, 50  # points of all slices, and of each at the least
_CURVES, _STEPS = 60, 100  # learning curves, and points of each
_BEST_SHARE = 0.2  # of the trials that are drawn, where not all are: the best ones, the others at random
_IMPROVEMENTS = 100  # rows of the history's table, the latest
_BINS = 5  # of a slice's table
_LETTERS = 14  # of a choice on an axis


@dataclass(frozen=True)
class StudyCharts:
    """A study as charts.

    Args:
        history: by number and by seconds.
        curves: learning curves; None where no trial has reported a value.
        slices: a chart for each setting.
        importance: fANOVA, where there is something to draw.
        notes: by section, a sentence on what is not drawn; empty where all is.
    """

    history: tuple[Chart, ...]
    curves: Chart | None
    slices: tuple[Chart, ...]
    importance: Chart | None
    notes: Mapping[str, str]


def study_charts(
    goal: Goal, trials: Sequence[Trial], events: Sequence[Event], importance: Importance, detail: float = 1.0
) -> StudyCharts:
    """Draws the charts.

    Args:
        goal: what the study searches; of several objectives one, with its values alone (`with_objective`).
        trials: its trials, by number.
        events: what happened, in its order; where they are not known there is no history by seconds.
        importance: of its settings.
        detail: share of the points that are drawn where there are too many.
    """
    measure = Measure(goal.objective, number_text, goal.maximize)
    history, history_note = _history(trials, events, measure, int(_HISTORY * detail))
    curves, curves_note = _curves(trials, measure, int(_CURVES * detail))
    values, names = importance.compared.values, _order(goal, importance)
    count = max(_FEWEST, int(_SLICES * detail) // len(goal.space.parameters))
    sliced, slices_note = _sample(values, goal.maximize, count, "trials")
    slices = (_slice(name, goal.space.parameters[name], trials, values, sliced, measure) for name in names)
    return StudyCharts(
        history,
        curves,
        tuple(chart for chart in slices if chart),
        _shares(importance.shares, "Share of the differences that a setting alone explains (fANOVA)"),
        {"history": history_note, "curves": curves_note, "slices": slices_note},
    )


def setting_text(value: Any) -> str:
    """Formats the value of a setting."""
    if isinstance(value, str):
        return value
    return number_text(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _order(goal: Goal, importance: Importance) -> list[str]:
    """Returns the settings, the most important first."""
    names = list(goal.space.parameters)
    return sorted(names, key=lambda name: -importance.shares.get(name, 0.0))


def _sample(values: Mapping[int, float], maximize: bool, count: int, name: str) -> tuple[list[int], str]:
    """Returns at most ``count`` trials, and a sentence if that leaves any out.

    They are the best ones, and some of the others at random.
    """
    if len(values) <= count:
        return list(values), ""
    ranked = sorted(values, key=lambda number: -values[number] if maximize else values[number])
    best = max(1, int(_BEST_SHARE * count))
    others = np.random.default_rng(0).choice(ranked[best:], count - best, replace=False).tolist()
    drawn = f"the best {best:,}, and {count - best:,} of the others at random"
    return sorted([*ranked[:best], *others]), f"{count:,} of {len(values):,} {name} are drawn: {drawn}."


def _tip(trial: Trial, value: float, objective: str, *others: str) -> str:
    state = "" if trial.state is TrialState.FINISHED else f" ({trial.state} at step {trial.step})"
    return ", ".join([f"trial {trial.number}{state}: {objective} {number_text(value)}", *others])


def _history(
    trials: Sequence[Trial], events: Sequence[Event], measure: Measure, count: int
) -> tuple[tuple[Chart, ...], str]:
    valued = [trial for trial in trials if trial.latest is not None]
    spent = _spent(events)
    unit, seconds = _time_unit(max(spent.values(), default=0.0))
    axes = [
        ("trial", {trial.number: float(trial.number) for trial in valued}),
        (f"{unit} of the study", {number: clock / seconds for number, clock in spent.items()}),
    ]
    charts, note = [], ""
    for name, at in axes:
        # Stable: trials that ended in one instant stay in the order of their numbers.
        ordered = sorted((trial for trial in valued if trial.number in at), key=lambda trial: at[trial.number])
        best = _improvements(ordered, measure.maximize)
        values = np.array([trial.latest for trial in ordered], dtype=np.float64)
        indices, _ = downsample(np.arange(len(ordered), dtype=np.float64), values, count // 2)
        if len(indices) < len(ordered):
            note = (
                f"{len(ordered):,} trials: of each {-(-len(ordered) // (count // 2)):,} that follow each other the one "
                "with the lowest and the one with the highest value are drawn; the line is that of all."
            )
        points = [
            TrialPoint(
                at[trial.number],
                trial.latest,
                str(trial.state),
                _tip(
                    trial,
                    trial.latest,
                    measure.name,
                    *([f"{format_seconds(spent[trial.number])} into the study"] if spent else []),
                ),
            )
            for trial in (ordered[int(index)] for index in indices)
            if trial.latest is not None
        ]
        last = max(at.values(), default=0.0)
        # Whole numbers of trials: five steps of one at the least.
        end = 5.0 * max(1, math.ceil(last / 5)) if name == "trial" else last
        x_axis = value_axis(ticks(0.0, end or 1.0, 5), number_text, name=name)
        rows = [
            (f"{trial.number}", measure.show(value), *([format_seconds(spent[trial.number])] if spent else []))
            for trial, value in best[-_IMPROVEMENTS:]
        ]
        chart = trial_points(
            points,
            measure,
            x_axis,
            f"{measure.name} by {name}",
            (("best so far: trial", measure.name, *(["into the study"] if spent else [])), rows),
            best=[(at[trial.number], value) for trial, value in best],
        )
        charts.append(chart)
    return tuple(chart for chart in charts if chart), note


def _spent(events: Sequence[Event]) -> dict[int, float]:
    """Returns the seconds of the study at the last value of each trial."""
    return {event.trial.number: event.clock for event in events if event.kind != "start"}


def _time_unit(seconds: float) -> tuple[str, float]:
    return next(
        ((name, size) for name, size in (("hours", 3600.0), ("minutes", 60.0)) if seconds >= 2 * size), ("seconds", 1.0)
    )


def _improvements(trials: Sequence[Trial], maximize: bool) -> list[tuple[Trial, float]]:
    """Returns the finished trials that were better than all finished ones before them."""
    best: list[tuple[Trial, float]] = []
    for trial in trials:
        value = trial.value
        if trial.state is not TrialState.FINISHED or value is None:
            continue
        if not best or (value > best[-1][1] if maximize else value < best[-1][1]):
            best.append((trial, value))
    return best


def _curves(trials: Sequence[Trial], measure: Measure, count: int) -> tuple[Chart | None, str]:
    reported = {trial.number: trial.reports[-1].value for trial in trials if trial.reports}
    if all(len(trial.reports) < 2 for trial in trials) and all(trial.ended for trial in trials):
        return None, ""
    best = best_trial(trials, maximize=measure.maximize)
    drawn, note = _sample(reported, measure.maximize, count, "learning curves")
    curves = [_curve(trials[number], measure) for number in drawn if best is None or number != best.number]
    highlighted = _curve(best, measure) if best is not None and best.reports else None
    return trial_curves(curves, highlighted, measure, f"{measure.name} by step"), note


def _curve(trial: Trial, measure: Measure) -> TrialCurve:
    steps, values = downsample(
        np.array([report.step for report in trial.reports], dtype=np.float64),
        np.array([report.value for report in trial.reports], dtype=np.float64),
        _STEPS // 2,
    )
    last = trial.reports[-1]
    tip = f"trial {trial.number}: {trial.state} at step {last.step}, {number_text(last.value)}"
    tip = f"{tip}, {truncate(trial.error, 120)}" if trial.error else tip
    end = TrialPoint(last.step, last.value, str(trial.state), tip)
    return TrialCurve([int(step) for step in steps], values.tolist(), end)


def _slice(
    name: str,
    parameter: Parameter,
    trials: Sequence[Trial],
    values: Mapping[int, float],
    drawn: Sequence[int],
    measure: Measure,
) -> Chart | None:
    points = [
        TrialPoint(
            parameter.to_unit(trials[number].drawn[name]),
            values[number],
            str(trials[number].state),
            _tip(trials[number], values[number], measure.name, f"{name} {setting_text(trials[number].drawn[name])}"),
        )
        for number in drawn
        if name in trials[number].drawn
    ]
    labels = parameter_labels(parameter)
    x_axis: Option = {
        **{"type": "value", "min": -0.03, "max": 1.03, "texts": labels},
        "axisLabel": {
            "customValues": [position for position, _ in labels],
            **{"alignMinLabel": "center", "alignMaxLabel": "center"},
        },
    }
    having = [number for number in values if name in trials[number].drawn]
    table = _slice_table(name, parameter, trials, {number: values[number] for number in having}, measure)
    chart = trial_points(points, measure, x_axis, name, table, small=True)
    if chart is None or len(having) == len(values):
        return chart
    note = f"in {len(having):,} of {len(values):,} trials"
    return replace(chart, note=", ".join(filter(None, [note, chart.note])))


def _slice_table(
    name: str, parameter: Parameter, trials: Sequence[Trial], values: Mapping[int, float], measure: Measure
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the number, the best and the median of all trials with each value, or in each fifth of the range."""
    groups: dict[str, list[float]] = {}
    if isinstance(parameter, Choice) or (isinstance(parameter, Int) and parameter.high - parameter.low < _BINS):
        groups = {setting_text(value): [] for value in parameter.grid(_BINS)}
        for number, value in values.items():
            groups[setting_text(trials[number].drawn[name])].append(value)
    else:
        edges = [setting_text(parameter.from_unit(at / _BINS)) for at in range(_BINS + 1)]
        bins = [f"{edges[at]} to {edges[at + 1]}" for at in range(_BINS)]
        groups = {text: [] for text in bins}
        for number, value in values.items():
            groups[bins[min(int(parameter.to_unit(trials[number].drawn[name]) * _BINS), _BINS - 1)]].append(value)
    best = max if measure.maximize else min
    rows: list[tuple[str, ...]] = [
        (text, f"{len(group):,}", *((measure.show(best(group)), measure.show(median(group))) if group else ("", "")))
        for text, group in groups.items()
    ]
    return (name, "trials", "best", "median"), rows


def parameter_labels(parameter: Parameter) -> list[tuple[float, str]]:
    """Returns positions in the unit interval with the values there, for an axis."""
    if isinstance(parameter, Choice):
        return [(parameter.to_unit(value), truncate(setting_text(value), _LETTERS)) for value in parameter.values]
    assert isinstance(parameter, Float | Int)
    values: Sequence[float]
    if isinstance(parameter, Float) and parameter.log:
        values = _log_ticks(parameter.low, parameter.high)
    elif parameter.log:  # such as a rank: its powers of two
        values = parameter.grid(5)
    else:
        values = [level for level in ticks(parameter.low, parameter.high, 4) if level in parameter]
    if isinstance(parameter, Int):
        values = [int(value) for value in values]
    return [(parameter.to_unit(value), number_text(value)) for value in values]


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns the powers of ten in a range; of a short one their doubles and halves, too."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        levels = [factor * 10.0**power for power in powers for factor in factors]
        inside = [level for level in levels if low * (1 - 1e-9) <= level <= high * (1 + 1e-9)]
        if len(inside) >= 3:
            return inside
    return [low, high]


def _shares(shares: Mapping[str, float], title: str) -> Chart | None:
    rows = [(name, max(share, 0.0), percent_text(share)) for name, share in shares.items()]
    chart = bars(rows, title, full=1.0, columns=("setting", "share"))
    return chart and replace(chart, heading=title)
