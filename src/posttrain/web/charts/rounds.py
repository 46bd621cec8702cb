"""Charts with one entry a round: the learning curve, and expected against achieved gain."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from posttrain.web.charts.svg import (
    LETTER,
    Formatter,
    Legend,
    Scale,
    element,
    figure,
    level_lines,
    level_words,
    text,
    ticks,
    tooltip,
)

DECISION_NAMES = {
    "baseline": "baseline",
    "deploy": "deployed",
    "refuse": "refused",
    "rollback": "rolled back",
}
"""The gate's decisions, in the reader's words."""


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
    points: Sequence[CurvePoint], title: str, *, measure: str = "", percent: bool = True, width: int = 760
) -> str:
    """Draws a mark for each candidate, a step line for the champion, and bars for the gain over it.

    Args:
        measure: name of the values, written at the top of their axis.
        percent: show the values, which are shares, as percentages from zero.
        width: of the chart in pixels; the text keeps its size.
    """
    if not points:
        return ""
    legend = _curve_legend(points, width - 60)
    height = (346 if width >= 500 else 286) + legend.height
    left, right, top = (56 if width >= 500 else 50), width - 28, 34
    bottom = height - 62 - legend.height
    values = [
        value
        for p in points
        for value in (p.value, *p.champions, *(p.bar or ()), p.random_baseline)
        if value is not None
    ]
    # Shares start at zero, so that a gain of one point does not look like a jump.
    marks = ticks(0 if percent else min(values), max(values), 5)
    low, high = marks[0], marks[-1]

    def x(at: float) -> float:
        return left + (right - left) * (at + 0.5) / len(points)

    def y(value: float) -> float:
        share = (min(max(value, low), high) - low) / ((high - low) or 1)
        return bottom - (bottom - top) * share

    grid = level_lines(marks, left, right, y, lambda mark: _value_text(mark, percent, 0), gap=8)
    # Names of rounds that would overlap are skipped, at even distances.
    every = max(1, -(-len(points) // max(int((right - left) / (84 if width >= 500 else 48)), 1)))
    names = [
        text(p.name, x(at), bottom + 20, "strong", "middle") + text(p.detail, x(at), bottom + 37, "soft", "middle")
        for at, p in enumerate(points)
        if at % every == 0
    ]
    path = " ".join(f"{'L' if at else 'M'}{x(at):.1f} {y(p.value):.1f}" for at, p in enumerate(points))
    line = element("path", d=path, class_="candidates")
    marks_drawn = [_candidate_mark(p, x(at), y, percent) for at, p in enumerate(points)]
    steps = _champion_steps(points, x, y, right)
    axis = text(measure, 4, 14, "soft")
    baseline = _random_baseline(points, x, y, percent)
    content = [axis, *grid, *names, steps, baseline, line, *marks_drawn, legend.at(left, bottom + 64)]
    return figure(width, height, title, *content)


def _champion_steps(points: Sequence[CurvePoint], x: Scale, y: Scale, right: float) -> str:
    path, pen = [], "M"
    for at, point in enumerate(points):
        champions = point.champions or (None,)
        room = (x(at + 1) if at + 1 < len(points) else right) - x(at)
        for step, value in enumerate(champions):
            start, end = (x(at) + room * part / len(champions) for part in (step, step + 1))
            path += [f"{pen}{start:.1f} {y(value):.1f}H{end:.1f}"] if value is not None else []
            # Unknown values leave a gap in the line.
            pen = "M" if value is None else "L"
    return element("path", d=" ".join(path), class_="champion") if path else ""


def _random_baseline(points: Sequence[CurvePoint], x: Scale, y: Scale, percent: bool) -> str:
    """Draws the random-selection baseline: a dashed line with small marks."""
    marked = [
        (x(at), y(p.random_baseline), p.random_baseline, p.name)
        for at, p in enumerate(points)
        if p.random_baseline is not None
    ]
    line = " ".join(f"{'L' if at else 'M'}{left:.1f} {top:.1f}" for at, (left, top, *_) in enumerate(marked))
    marks = [
        element("g", tooltip(f"{name}, drawn at random: {_value_text(value, percent, 1)}"), _diamond(left, top))
        for left, top, value, name in marked
    ]
    return element("path", d=line, class_="random-line") + "".join(marks) if marked else ""


def _diamond(x: float, y: float) -> str:
    return element("path", d=f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z", class_="random-mark")


def _candidate_mark(point: CurvePoint, x: float, y: Scale, percent: bool) -> str:
    value = _value_text(point.value, percent, 1)
    label = f"{point.name}: {value}, {DECISION_NAMES.get(point.decision, point.decision)}"
    bar, above, lowest = "", y(point.value), y(point.value)
    label += f", {point.gain}" if point.gain else ""
    if point.bar is not None:
        ends = y(point.bar[0]), y(point.bar[1])
        above, lowest = min(above, ends[1]), max(lowest, ends[0])
        whiskers = "".join(element("line", x1=x - 5, x2=x + 5, y1=end, y2=end, class_="error") for end in ends)
        bar = element("line", x1=x, x2=x, y1=ends[0], y2=ends[1], class_="error") + whiskers
    # The champion's line runs above a refused candidate.
    below = point.decision in ("refuse", "rollback")
    # A label that would run into the names below the axis goes above its mark.
    below = below and lowest + 24 < y(0) - 4
    number = text(value, x, lowest + 24 if below else above - 12, "value", "middle")
    return element("g", tooltip(label), bar, _decision_symbol(point.decision, x, y(point.value)), number)


def _decision_symbol(decision: str, x: float, y: float) -> str:
    """Draws a mark that shows the decision by its shape as well as by its colour."""
    if decision == "deploy":
        return element("circle", cx=x, cy=y, r=6.5, class_="deploy")
    # The halo separates the cross from the line that runs through it.
    if decision == "refuse":
        cross = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
        return element("circle", cx=x, cy=y, r=9, class_="halo") + element("path", d=cross, class_="refuse")
    if decision == "rollback":
        return element("path", d=f"M{x - 7:.1f} {y - 5:.1f}h14l-7 12z", class_="rollback")
    return element("rect", x=x - 5.5, y=y - 5.5, width=11, height=11, class_="baseline")


def _curve_legend(points: Sequence[CurvePoint], width: float) -> Legend:
    used = [decision for decision in DECISION_NAMES if any(point.decision == decision for point in points)]
    random_item = [("drawn at random", _diamond)] if any(point.random_baseline is not None for point in points) else []
    decided = [(DECISION_NAMES[name], partial(_decision_symbol, name)) for name in used]
    return Legend([*decided, ("champion in use", _champion_symbol), *random_item], width)


def _champion_symbol(x: float, y: float) -> str:
    return element("line", x1=x - 8, x2=x + 8, y1=y, y2=y, class_="champion")


def _value_text(value: float, percent: bool, digits: int) -> str:
    return f"{100 * value:.{digits}f}%" if percent else f"{value:.4g}"


_EXPECTATION_ROW = 34


@dataclass(frozen=True)
class Expectation:
    """An expected value with its interval ``low`` to ``high``; ``achieved`` is None while it is unknown."""

    name: str
    expected: float
    low: float
    high: float
    achieved: float | None = None


def expectations(rows: Sequence[Expectation], title: str, show: Formatter, *, width: int = 760) -> str:
    """Draws an interval and a mark a row on one scale that includes zero; returns "" without rows.

    Args:
        show: formats a value.
    """
    if not rows:
        return ""
    labels = [show(row.expected) + (f" → {show(row.achieved)}" if row.achieved is not None else "") for row in rows]
    values = [value for row in rows for value in (row.low, row.high, row.expected, row.achieved) if value is not None]
    levels = ticks(min(0.0, *values), max(0.0, *values), 5 if width >= 500 else 3)
    # All values may be zero: the scale would divide by nothing.
    levels = levels if len(levels) > 1 else [levels[0], levels[0] + 1.0]
    left = max(len(row.name) for row in rows) * LETTER + 22
    right, bottom = width - max(map(len, labels)) * LETTER - 22, len(rows) * _EXPECTATION_ROW + 8.0

    def x(value: float) -> float:
        return left + (right - left) * (value - levels[0]) / (levels[-1] - levels[0])

    marks = []
    for level in levels:
        marks.append(element("line", x1=x(level), x2=x(level), y1=2, y2=bottom, class_="grid" if level else "zero"))
    # Axis labels may extend below the columns of names and values.
    half = max(len(show(level)) for level in levels) * LETTER / 2
    marks += level_words(levels, x, show, left - half + 12, right + half - 14, bottom + 16)
    for at, (row, label) in enumerate(zip(rows, labels, strict=True)):
        y = at * _EXPECTATION_ROW + 22.0
        came = f"achieved {show(row.achieved)}" if row.achieved is not None else "not achieved yet"
        sentence = f"{row.name}: expected {show(row.expected)}, {show(row.low)} to {show(row.high)}; {came}"
        wide = max(x(row.high) - x(row.low), 1.0)
        parts = [
            tooltip(sentence),
            text(row.name, left - 14, y + 4, "strong", "end"),
            element("rect", x=x(row.low), y=y - 6, width=wide, height=12, rx=6, class_="range"),
            _expected_symbol(x(row.expected), y),
        ]
        parts += [_achieved_symbol(x(row.achieved), y)] if row.achieved is not None else []
        marks.append(element("g", *parts, text(label, width - 4, y + 4, "", "end")))
    legend = Legend([("expected, with its interval", _expected_symbol), ("achieved", _achieved_symbol)], width)
    return figure(width, bottom + 36 + legend.height, title, *marks, legend.at(2, bottom + 42))


def _expected_symbol(x: float, y: float) -> str:
    return element("rect", x=x - 1.5, y=y - 9, width=3, height=18, rx=1.5, class_="expected")


def _achieved_symbol(x: float, y: float) -> str:
    return element("circle", cx=x, cy=y, r=6.5, class_="deploy")
