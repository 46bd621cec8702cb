"""Charts with one entry per round: the learning curve, and expected against achieved gain."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.report.charts.chart import Chart, Formatter, Option, name_axis, side_labels, ticks, value_axis
from posttrain.store.message import Message

DECISION_NAMES = {
    "baseline": Message("baseline"),
    "deploy": Message("deployed"),
    "refuse": Message("refused"),
    "rollback": Message("rolled back"),
}
"""The gate's decisions, in the reader's words."""

# Each shows the decision by its shape as well as by its colour.
_CROSS = "path://M0 2L2 0L5 3L8 0L10 2L7 5L10 8L8 10L5 7L2 10L0 8L3 5Z"
_SYMBOLS: dict[str, tuple[Option, Option]] = {
    "baseline": ({"symbol": "rect", "symbolSize": 11}, {"color": "$paper", "borderColor": "$gray", "borderWidth": 3}),
    "deploy": ({"symbol": "circle", "symbolSize": 14}, {"color": "$blue", "borderColor": "$paper", "borderWidth": 2}),
    "refuse": ({"symbol": _CROSS, "symbolSize": 14}, {"color": "$red", "borderColor": "$paper", "borderWidth": 1}),
    "rollback": (
        {"symbol": "triangle", "symbolSize": 14, "symbolRotate": 180},
        {"color": "$purple", "borderColor": "$paper", "borderWidth": 1.5},
    ),
}
_CHAMPION, _RANDOM = Message("champion in use"), Message("drawn at random")


@dataclass(frozen=True)
class CurvePoint:
    """One round of the learning curve, in the chart's unit.

    ``value`` is the candidate's; ``champions`` are those of the models in use from this round's decision to the next
    one's, None if unknown; ``gain`` describes the gain over the champion, and ``bar`` is its interval (low, high) laid
    onto the champion's value; ``random_baseline`` is the value of the random-selection loop in this round.
    """

    name: str
    detail: str
    value: float
    champions: tuple[float | None, ...]
    decision: str
    gain: str = ""
    bar: tuple[float, float] | None = None
    random_baseline: float | None = None


def learning_curve_chart(
    points: Sequence[CurvePoint], title: str, *, measure: str = "", percent: bool = True
) -> Chart | None:
    """Draws a mark for each candidate, a step line for the champion, and bars for the gain over it.

    Args:
        measure: name of the values, written at the top of their axis.
        percent: show the values, which are shares, as percentages from zero.
    """
    if not points:
        return None
    values = [
        value
        for p in points
        for value in (p.value, *p.champions, *(p.bar or ()), p.random_baseline)
        if value is not None
    ]
    # Shares start at zero, so that a gain of one point does not look like a jump.
    levels = ticks(0 if percent else min(values), max(values), 5)
    used = [decision for decision in _SYMBOLS if any(point.decision == decision for point in points)]
    used += list(dict.fromkeys(point.decision for point in points if point.decision not in _SYMBOLS))
    series = [_champion_line(points), _random_line(points, percent), _dotted_line(points), _intervals(points)]
    series += [_marks(points, decision, percent, levels[0]) for decision in used]
    drawn = [entry for entry in series if entry["data"]]
    names = [Message.joined("\n", filter(None, (point.name, point.detail))) for point in points]
    hidden: Option = {"type": "value", "show": False, "min": 0, "max": len(points)}
    option: Option = {
        "grid": {"top": 22, "right": 12},
        # The champion's line changes between rounds too: its own axis has numbers where the first has names.
        "xAxis": [{"type": "category", "data": names, "axisLabel": {"lineHeight": 17}}, hidden],
        "yAxis": value_axis(levels, lambda level: _value_text(level, percent, 0)),
        "tooltip": {"trigger": "item"},
        "legend": {"data": [_legend_entry(entry["name"]) for entry in drawn if entry["name"]]},
        "series": drawn,
    }
    columns = (Message("round"), measure or Message("candidate"), Message("decision"), Message("gain"), _CHAMPION)
    has_random = any(point.random_baseline is not None for point in points)
    table = [_row(point, percent, has_random) for point in points]
    return Chart(title, option, 330, columns + ((_RANDOM,) if has_random else ()), table, heading=measure)


def _legend_entry(name: str) -> Option:
    # The broad line has no symbol, and ECharts would show it as a dot like that of a deployed model.
    return {"name": name, "icon": "path://M0 5H16V9H0Z"} if name == _CHAMPION else {"name": name}


def _champion_line(points: Sequence[CurvePoint]) -> Option:
    """Builds the champion's steps; unknown values leave a gap."""
    data: list[tuple[float, float | None]] = []
    for at, point in enumerate(points):
        champions = point.champions or (None,)
        # The last round's champion has only the rest of the axis.
        room = 1.0 if at + 1 < len(points) else 0.5
        for step, value in enumerate(champions):
            start, end = (at + 0.5 + room * part / len(champions) for part in (step, step + 1))
            data += [(start, None)] if value is None else [(start, value), (end, value)]
    style: Option = {"color": "$blue", "width": 4, "opacity": 0.35, "join": "round"}
    if all(value is None for _, value in data):
        data = []
    line: Option = {
        "type": "line",
        "name": _CHAMPION,
        "xAxisIndex": 1,
        "data": data,
        "symbol": "none",
        "silent": True,
    }
    return line | {"lineStyle": style, "itemStyle": {"color": "$blue"}}


def _random_line(points: Sequence[CurvePoint], percent: bool) -> Option:
    data = [
        {
            "value": (at, p.random_baseline),
            "tip": Message(
                "{name}, drawn at random: {value}", name=p.name, value=_value_text(p.random_baseline, percent, 1)
            ),
        }
        for at, p in enumerate(points)
        if p.random_baseline is not None
    ]
    style: Option = {"color": "$soft", "width": 1.5, "type": [6, 4]}
    line: Option = {"type": "line", "name": _RANDOM, "data": data, "symbol": "diamond", "symbolSize": 9}
    return line | {"lineStyle": style, "itemStyle": {"color": "$soft"}, "showAllSymbol": True}


def _dotted_line(points: Sequence[CurvePoint]) -> Option:
    """Joins the candidates."""
    style: Option = {"color": "$gray", "width": 1.5, "type": [2, 5], "cap": "round"}
    line: Option = {
        "type": "line",
        "name": "",
        "data": [point.value for point in points],
        "showSymbol": False,
        "silent": True,
    }
    return line | {"lineStyle": style}


def _intervals(points: Sequence[CurvePoint]) -> Option:
    """Builds an upright bar with whiskers for each interval: one line, broken after each."""
    data: list[tuple[int, float | None]] = []
    for at, point in enumerate(points):
        data += [(at, point.bar[0]), (at, point.bar[1]), (at, None)] if point.bar else []
    whiskers: Option = {
        "symbol": "rect",
        "symbolSize": [10, 1.5],
        "showAllSymbol": True,
        "itemStyle": {"color": "$soft"},
    }
    line: Option = {
        "type": "line",
        "name": "",
        "data": data,
        "silent": True,
        "lineStyle": {"color": "$soft", "width": 1.5},
    }
    return line | whiskers


def _marks(points: Sequence[CurvePoint], decision: str, percent: bool, lowest: float) -> Option:
    symbol, style = _SYMBOLS.get(decision, _SYMBOLS["baseline"])
    name = DECISION_NAMES.get(decision) or decision
    # The champion's line runs above a refused candidate, whose label goes below it.
    below = decision in ("refuse", "rollback")
    data = []
    for at, point in enumerate(points):
        if point.decision == decision:
            text = _value_text(point.value, percent, 1)
            value = Message("{name}: {value}", name=point.name, value=text)
            tip = Message.joined(", ", filter(None, (value, name, point.gain)))
            beside = below and point.value > lowest
            label = {"position": "bottom" if beside else "top"}
            data.append({"value": (at, point.value), "text": text, "tip": tip, "label": label})
    halo = {"textBorderColor": "$paper", "textBorderWidth": 4}
    shown: Option = {"show": True, "color": "$ink", "fontWeight": 600, "distance": 9, **halo}
    marks: Option = {
        "type": "scatter",
        "name": name,
        "data": data,
        "itemStyle": style | {"opacity": 1},
        "label": shown,
        "z": 5,
    }
    return marks | symbol


def _row(point: CurvePoint, percent: bool, has_random: bool) -> tuple[str, ...]:
    values = (Message("unknown") if value is None else _value_text(value, percent, 1) for value in point.champions)
    champions = Message.joined(", then ", values)
    decision = DECISION_NAMES.get(point.decision) or point.decision
    row = (point.name, _value_text(point.value, percent, 1), decision, point.gain, champions)
    random = "" if point.random_baseline is None else _value_text(point.random_baseline, percent, 1)
    return (*row, random) if has_random else row


def _value_text(value: float, percent: bool, digits: int) -> str:
    return f"{100 * value:.{digits}f}%" if percent else f"{value:.4g}"


@dataclass(frozen=True)
class Expectation:
    """An expected value with its interval ``low`` to ``high``; ``achieved`` is None while it is unknown."""

    name: str
    expected: float
    low: float
    high: float
    achieved: float | None = None


def expectations(rows: Sequence[Expectation], title: str, show: Formatter) -> Chart | None:
    """Draws an interval and a mark a row on one scale that includes zero, and what was achieved since.

    Args:
        show: formats a value.

    Returns:
        None without rows.
    """
    names = (Message("expected, with its interval"), Message("achieved"))
    tips = []
    for row in rows:
        template = "{name}: expected {expected}; achieved {achieved}"
        if row.achieved is None:
            template = "{name}: expected {expected}; not achieved yet"
        achieved_text = "" if row.achieved is None else show(row.achieved)
        tips.append(Message(template, name=row.name, expected=_interval_text(row, show), achieved=achieved_text))
    labels = [show(row.expected) + (f" → {show(row.achieved)}" if row.achieved is not None else "") for row in rows]
    table = [(*_interval_row(row, show), show(row.achieved) if row.achieved is not None else "–") for row in rows]
    drawn = _interval_series(rows, tips, names[0])
    achieved = [
        {"value": (row.achieved, at), "tip": tips[at]} for at, row in enumerate(rows) if row.achieved is not None
    ]
    style = {"color": "$blue", "opacity": 1, "borderColor": "$paper", "borderWidth": 2}
    drawn.append({"type": "scatter", "name": names[1], "data": achieved, "symbol": "circle", "symbolSize": 13})
    drawn[-1]["itemStyle"] = style
    values = [row.achieved for row in rows if row.achieved is not None]
    option = _interval_option(rows, values, drawn, labels, show) | {"legend": {"data": list(names)}}
    columns = ("", Message("expected"), Message("interval"), Message("achieved"))
    return Chart(title, option, 34 * len(rows) + 30, columns, table) if rows else None


def intervals(rows: Sequence[Expectation], title: str, columns: tuple[str, str, str], show: Formatter) -> Chart | None:
    """Draws measured values with their intervals on one scale that includes zero.

    Args:
        columns: names of the table's columns: the row, the value, the interval.
        show: formats a value.

    Returns:
        None without rows.
    """
    tips = [Message("{name}: {value}", name=row.name, value=_interval_text(row, show)) for row in rows]
    drawn = _interval_series(rows, tips, columns[1])
    option = _interval_option(rows, [], drawn, [show(row.expected) for row in rows], show)
    table = [_interval_row(row, show) for row in rows]
    return Chart(title, option, 34 * len(rows) + 30, columns, table) if rows else None


def _interval_text(row: Expectation, show: Formatter) -> Message:
    values = {"value": show(row.expected), "low": show(row.low), "high": show(row.high)}
    return Message("{value}, {low} to {high}", **values)


def _interval_row(row: Expectation, show: Formatter) -> tuple[str, str, str]:
    interval = Message("{low} to {high}", low=show(row.low), high=show(row.high))
    return row.name, show(row.expected), interval


def _interval_series(rows: Sequence[Expectation], tips: Sequence[str], name: str) -> list[Option]:
    """Builds a bar for each interval, in one line that is broken after each, and a mark for each value."""
    ranges: list[tuple[float | None, int]] = []
    for at, row in enumerate(rows):
        ranges += [(row.low, at), (row.high, at), (None, at)]
    values = [{"value": (row.expected, at), "tip": tips[at]} for at, row in enumerate(rows)]
    band: Option = {"color": "$gray", "width": 12, "opacity": 0.35, "cap": "round"}
    marks: Option = {"type": "scatter", "name": name, "data": values, "symbol": "rect", "symbolSize": [3, 18]}
    return [
        {"type": "line", "name": "", "data": ranges, "showSymbol": False, "silent": True, "lineStyle": band},
        marks | {"itemStyle": {"color": "$ink", "opacity": 1}},
    ]


def _interval_option(
    rows: Sequence[Expectation], others: Sequence[float], series: list[Option], labels: list[str], show: Formatter
) -> Option:
    """Builds the axes, long enough for the intervals and the ``others``."""
    values = [0.0, *others, *(value for row in rows for value in (row.low, row.high, row.expected))]
    return {
        "grid": {"top": 4},
        "xAxis": value_axis(ticks(min(values), max(values), 5), show),
        "yAxis": [
            name_axis([row.name for row in rows], axisLine={"onZero": True, "lineStyle": {"color": "$soft"}}),
            side_labels(labels),
        ],
        "tooltip": {"trigger": "item"},
        "series": series,
    }
