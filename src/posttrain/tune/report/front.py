"""Builds the charts of a study's Pareto front: pairs of objectives."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from posttrain.report.charts.chart import Chart, Option, value_axis
from posttrain.report.formatting import number_text
from posttrain.tune.objectives import Objectives
from posttrain.tune.report.trial_charts import Measure
from posttrain.tune.trial import Trial, TrialState

_POINTS = 1000  # of trials that are on no front, in each chart

_Layer = tuple[str, Sequence[Trial], Option, Option]  # name, trials, symbol and style

_CHOSEN, _FRONT, _OTHERS = "chosen", "front", "other trials"


def front_charts(
    objectives: Objectives, trials: Sequence[Trial], front: Sequence[Trial], chosen: Trial | None, detail: float = 1.0
) -> tuple[tuple[Chart, ...], str]:
    """Draws each pair of objectives, with the finished trials, those of the front, and the one that was chosen.

    Args:
        objectives: of the study.
        trials: all of them.
        front: those of the front.
        chosen: one of these.
        detail: share of the points that are drawn where there are too many.

    Returns:
        The charts, and a sentence if trials are left out.
    """
    numbers = {trial.number for trial in front}
    others = [trial for trial in _finished(trials) if trial.number not in numbers]
    note, count = "", int(_POINTS * detail)
    if len(others) > count:
        note = f"Of {len(others):,} trials that are on no front {count:,} are drawn, at random."
        kept = np.random.default_rng(0).choice(len(others), count, replace=False)
        others = [others[index] for index in sorted(kept.tolist())]
    layers: list[_Layer] = [
        (_OTHERS, others, {"symbol": "circle", "symbolSize": 5}, {"color": "$gray", "opacity": 0.6}),
        (_FRONT, [trial for trial in front if trial is not chosen], {"symbol": "circle", "symbolSize": 8}, {}),
        (_CHOSEN, [] if chosen is None else [chosen], {"symbol": "diamond", "symbolSize": 15}, {"color": "$red"}),
    ]
    charts = []
    if front:
        for x, y in combinations(range(len(objectives)), 2):
            charts.append(_pair(objectives, x, y, layers, front))
    return tuple(charts), note


def _pair(
    objectives: Objectives,
    x: int,
    y: int,
    layers: Sequence[_Layer],
    front: Sequence[Trial],
) -> Chart:
    drawn = [trial for _, members, _, _ in layers for trial in members]
    axes, notes = [], []
    for at in (x, y):
        measure = Measure(objectives.names[at], number_text, objectives.directions[at])
        levels, beyond = measure.levels([_values(trial)[at] for trial in drawn])
        axes.append((levels, measure))
        if beyond:
            notes.append(f"{measure.name}: {beyond}")
    series: list[Option] = []
    if len(objectives) == 2:
        # The border of what the front dominates: steps, as nothing between two trials has been reached.
        ordered = sorted(front, key=lambda trial: _values(trial)[x])
        step = "start" if objectives.directions[x] else "end"
        points = [(_values(trial)[x], _values(trial)[y]) for trial in ordered]
        line = {"type": "line", "name": "border", "data": points, "step": step, "z": 1, "lineStyle": {"color": "$s1"}}
        series.append(line | {"itemStyle": {"color": "$s1"}, "showSymbol": False, "silent": True})
    for name, members, symbol, style in layers:
        data = [
            {
                "value": (_values(trial)[x], _values(trial)[y]),
                "tip": f"trial {trial.number}: {objectives.describe(_values(trial))}",
            }
            for trial in members
        ]
        marks = {"type": "scatter", "name": name, "data": data, "z": 3, "itemStyle": {"color": "$blue", **style}}
        series.append(marks | symbol)
    series = [entry for entry in series if entry["data"]]
    (x_levels, x_measure), (y_levels, y_measure) = axes
    option: Option = {
        "grid": {"top": 10, "bottom": 0, "right": 12},
        "xAxis": value_axis(x_levels, number_text, name=x_measure.name, nameLocation="middle"),
        "yAxis": value_axis(y_levels, number_text),
        "tooltip": {"trigger": "item"},
        "legend": {"data": [entry["name"] for entry in series]},
        "series": series,
    }
    title = f"{y_measure.name} by {x_measure.name}"
    rows = [
        (f"{trial.number}", number_text(_values(trial)[x]), number_text(_values(trial)[y]))
        for trial in sorted(front, key=lambda trial: _values(trial)[x])
    ]
    columns = ("trial of the front", x_measure.name, y_measure.name)
    return Chart(title, option, 300, columns, rows, note="; ".join(notes), heading=title)


def _finished(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.state is TrialState.FINISHED and trial.values is not None]


def _values(trial: Trial) -> tuple[float, ...]:
    values = trial.values
    assert values is not None, "a finished trial has values"
    return values
