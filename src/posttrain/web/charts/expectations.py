"""What was expected, with how sure that was, against what came."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.web.charts.svg import LETTER, Formatter, Legend, element, figure, level_words, text, ticks, tooltip

_EXPECTATION_ROW = 34


@dataclass(frozen=True)
class Expectation:
    """A value that was expected between ``low`` and ``high``; ``achieved`` is None where nothing is known yet."""

    name: str
    expected: float
    low: float
    high: float
    achieved: float | None = None


def expectations(rows: Sequence[Expectation], title: str, show: Formatter, *, width: int = 760) -> str:
    """An interval and a mark a row on one scale, with zero on it; empty without rows.

    Args:
        show: a value in words.
    """
    if not rows:
        return ""
    words = [show(row.expected) + (f" → {show(row.achieved)}" if row.achieved is not None else "") for row in rows]
    known = [value for row in rows for value in (row.low, row.high, row.expected, row.achieved) if value is not None]
    levels = ticks(min(0.0, *known), max(0.0, *known), 5 if width >= 500 else 3)
    levels = levels if len(levels) > 1 else [levels[0], levels[0] + 1.0]
    left = max(len(row.name) for row in rows) * LETTER + 22
    right, bottom = width - max(map(len, words)) * LETTER - 22, len(rows) * _EXPECTATION_ROW + 8.0

    def x(value: float) -> float:
        return left + (right - left) * (value - levels[0]) / (levels[-1] - levels[0])

    drawn = []
    for level in levels:
        drawn.append(element("line", x1=x(level), x2=x(level), y1=2, y2=bottom, class_="grid" if level else "zero"))
    half = max(len(show(level)) for level in levels) * LETTER / 2  # below the names and the words there is room
    drawn += level_words(levels, x, show, left - half + 12, right + half - 14, bottom + 16)
    for at, (row, told) in enumerate(zip(rows, words, strict=True)):
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
        drawn.append(element("g", *parts, text(told, width - 4, y + 4, "", "end")))
    legend = Legend([("expected, with its interval", _expected_symbol), ("achieved", _achieved_symbol)], width)
    return figure(width, bottom + 36 + legend.height, title, *drawn, legend.at(2, bottom + 42))


def _expected_symbol(x: float, y: float) -> str:
    return element("rect", x=x - 1.5, y=y - 9, width=3, height=18, rx=1.5, class_="expected")


def _achieved_symbol(x: float, y: float) -> str:
    return element("circle", cx=x, cy=y, r=6.5, class_="deploy")
