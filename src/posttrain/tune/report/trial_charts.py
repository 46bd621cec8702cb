"""Charts of the trials of a search: points by state, and learning curves with their ends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.report.charts.chart import Chart, Formatter, Option, ticks, value_axis
from posttrain.tune.losses import worst_shown

# Each shows the state by its shape as well as by its colour.
_CROSS = "path://M0 2L2 0L5 3L8 0L10 2L7 5L10 8L8 10L5 7L2 10L0 8L3 5Z"
STATES: dict[str, tuple[Option, Option]] = {
    "finished": ({"symbol": "circle", "symbolSize": 7}, {"color": "$blue"}),
    "stopped": ({"symbol": _CROSS, "symbolSize": 7}, {"color": "$gray"}),
    "paused": ({"symbol": "rect", "symbolSize": 7}, {"color": "$purple"}),
    "running": ({"symbol": "diamond", "symbolSize": 9}, {"color": "$green"}),
    "failed": ({"symbol": "triangle", "symbolSize": 9}, {"color": "$red"}),
}
"""Symbol and style of the points of each state."""

BEST = "best so far"
"""Name of the line over the points."""


@dataclass(frozen=True)
class TrialPoint:
    """A trial in a chart.

    Args:
        x, value: its position.
        state: a key of `STATES`.
        tip: its tooltip.
    """

    x: float
    value: float
    state: str
    tip: str


@dataclass(frozen=True)
class TrialCurve:
    """The values that a trial has reported, by step, and its point at the end."""

    steps: Sequence[int]
    values: Sequence[float]
    end: TrialPoint


@dataclass(frozen=True)
class Measure:
    """The values of a search.

    Args:
        name: of them.
        show: formats one.
        maximize: whether greater ones are better.
    """

    name: str
    show: Formatter
    maximize: bool = False

    def levels(self, values: Sequence[float]) -> tuple[list[float], str]:
        """Returns the levels of an axis, and a remark on values that are too bad for it.

        A single training that diverged would flatten all others.
        """
        every = np.array(values, dtype=np.float64)
        worst = worst_shown(every, self.maximize)
        best = float(every.max() if self.maximize else every.min())
        levels = ticks(min(best, worst), max(best, worst), 4)
        edge = levels[0] if self.maximize else levels[-1]
        beyond = int((every < edge if self.maximize else every > edge).sum())
        return levels, f"{beyond:,} {'below' if self.maximize else 'above'} {self.show(edge)}" if beyond else ""


def trial_points(
    points: Sequence[TrialPoint],
    measure: Measure,
    x_axis: Option,
    title: str,
    table: tuple[tuple[str, ...], Sequence[tuple[str, ...]]],
    *,
    best: Sequence[tuple[float, float]] = (),
    small: bool = False,
) -> Chart | None:
    """Draws a point for each trial, shaped by its state, and the best value so far as steps.

    Args:
        points: the trials.
        measure: the values.
        x_axis: the other axis; its name is the heading.
        title: describes the chart where it cannot be seen.
        table: columns and rows of its numbers.
        best: where the best value changes, with the new one; the line continues to the last point.
        small: for a grid of charts.

    Returns:
        None without points.
    """
    if not points:
        return None
    levels, beyond = measure.levels([point.value for point in points])
    series = _by_state(points)
    legend = [entry["name"] for entry in series]
    if best:
        last = max(best[-1][0], *(point.x for point in points))
        line = {"type": "line", "name": BEST, "data": [*best, (last, best[-1][1])], "step": "end", "z": 1}
        style = {"lineStyle": {"color": "$s1", "width": 2}, "itemStyle": {"color": "$s1"}}
        series.append(line | style | {"showSymbol": False, "silent": True})
        legend.append(BEST)
    option: Option = {
        "grid": {"top": 10, "bottom": 0, "right": 12},
        "xAxis": {"nameLocation": "middle", "splitLine": {"show": False}, **x_axis},
        "yAxis": value_axis(levels, measure.show),
        "tooltip": {"trigger": "item"},
        "legend": {"data": legend},
        "series": series,
    }
    columns, rows = table
    return Chart(title, option, 210 if small else 280, columns, rows, note=beyond, heading=title)


def _by_state(points: Sequence[TrialPoint]) -> list[Option]:
    series = []
    for state, (symbol, style) in STATES.items():
        data = [{"value": (point.x, point.value), "tip": point.tip} for point in points if point.state == state]
        marks = {"type": "scatter", "name": state, "data": data, "z": 3, "itemStyle": {"opacity": 0.75, **style}}
        series.append(marks | symbol)
    return [entry for entry in series if entry["data"]]


def trial_curves(curves: Sequence[TrialCurve], best: TrialCurve | None, measure: Measure, title: str) -> Chart | None:
    """Draws the values that trials have reported, the best trial's broad, with a point where each has ended.

    Args:
        curves: of all trials but the best.
        best: of the best one, if it has reported any.
        measure: the values.
        title: describes the chart.

    Returns:
        None without curves.
    """
    every = [*curves, *([best] if best else [])]
    if not every:
        return None
    levels, beyond = measure.levels([value for curve in every for value in curve.values])
    data: list[tuple[float, float | None]] = []
    for curve in curves:
        # A line that breaks after each trial: hundreds of series would be slow.
        data += [*zip(curve.steps, curve.values, strict=True), (curve.steps[-1], None)]
    drawn: list[Option] = [_line("others", data, "$gray", 1, 0.45)] if curves else []
    if best:
        points: list[tuple[float, float | None]] = list(zip(best.steps, best.values, strict=True))
        drawn.append(_line("best trial", points, "$s1", 2.5, 1))
    ends = _by_state([curve.end for curve in every])
    last = max(curve.steps[-1] for curve in every)
    option: Option = {
        "grid": {"top": 10, "bottom": 0, "right": 12},
        "xAxis": {
            **{"type": "value", "min": min(curve.steps[0] for curve in every), "max": last, "minInterval": 1},
            **{"name": "step", "nameLocation": "middle", "splitLine": {"show": False}},
        },
        "yAxis": value_axis(levels, measure.show),
        "tooltip": {"trigger": "item"},
        "legend": {"data": [entry["name"] for entry in (*drawn, *ends)]},
        "series": [*drawn, *ends],
    }
    if option["xAxis"]["min"] == last:
        # An axis of one step has no width.
        option["xAxis"] |= {"min": last - 0.5, "max": last + 0.5}
    rows = [
        (curve.end.tip, f"{len(curve.steps):,}", measure.show(curve.values[0]), measure.show(curve.values[-1]))
        for curve in every
    ]
    return Chart(title, option, 300, ("", "reports", "first", "last"), rows, note=beyond, heading=title)


def _line(name: str, data: Sequence[tuple[float, float | None]], colour: str, width: float, opacity: float) -> Option:
    style = {"color": colour, "width": width, "opacity": opacity}
    line = {"type": "line", "name": name, "data": data, "lineStyle": style, "itemStyle": {"color": colour}}
    return line | {"showSymbol": False, "silent": True, "z": 1}
