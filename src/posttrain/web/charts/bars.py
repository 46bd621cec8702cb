"""Horizontal bars: a number for each of many names, and the parts of a whole for a few."""

from collections.abc import Iterable, Mapping, Sequence

from posttrain.web.charts.svg import LETTER, Legend, element, figure, swatch, text, tooltip, truncate

SERIES = 8
"""Colours that readers with any colour vision tell apart; later series share the last."""


def bars(
    rows: Sequence[tuple[str, float, str]],
    title: str,
    *,
    width: int = 760,
    full: float | None = None,
    kind: str = "a",
    classes: Sequence[str] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """One bar a row, in the order given.

    Args:
        rows: name, length and the words beside the bar.
        full: the value of a bar that fills its track; the greatest value if left out.
        kind: colour of the bars, ``a`` or ``b``.
        classes: of each bar, where they do not all have one colour.
        marks: one or two values, rising, with words for them, drawn as lines across all bars.
    """
    if not rows:
        return ""
    names = min(max(len(name) for name, _, _ in rows) * LETTER + 14, 0.46 * width)
    numbers = max(len(words) for _, _, words in rows) * LETTER + 14
    room, step = width - names - numbers, 24 if len(rows) <= 32 else 18
    most = full or max(value for _, value, _ in rows) or 1.0
    top = 22 if marks else 0
    colours = classes or [f"bar-{kind}"] * len(rows)
    drawn = []
    for at, (name, value, words) in enumerate(rows):
        y, length = top + at * step + 4, room * min(value / most, 1.0)
        drawn += [
            element(
                "g",
                tooltip(f"{name}: {words}"),
                text(truncate(name, names - 12), names - 8, y + 13, "", "end"),
                element("rect", x=names, y=y + 2, width=room, height=14, rx=3, class_="track"),
                element("rect", x=names, y=y + 2, width=length, height=14, rx=3, class_=colours[at]),
                text(words, names + room + 8, y + 13, "strong"),
            )
        ]
    bottom = top + len(rows) * step + 4
    for at, (value, words) in enumerate(marks):
        x = names + room * min(value / most, 1.0)
        anchor = "middle" if len(marks) == 1 else "start" if at else "end"  # so that two do not touch
        drawn.append(element("line", x1=x, x2=x, y1=top - 2, y2=bottom, class_="mark-line"))
        drawn.append(text(words, x, 12, "soft small", anchor))
    return figure(width, bottom, title, *drawn)


def count_rows(counts: Iterable[tuple[str, int]]) -> list[tuple[str, float, str]]:
    """Rows of `bars` for names and counts."""
    return [(name, float(count), f"{count:,}") for name, count in counts]


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], series: Sequence[str], title: str, *, width: int = 760
) -> str:
    """One bar a row, divided into the series' seconds, with the row's total beside it.

    Args:
        rows: name and seconds by series; a series that is missing counts as none.
        series: every series, in the order in which they stand in the bar and in the legend.
    """
    if not rows or not series:
        return ""
    totals = [sum(parts.get(name, 0.0) for name in series) for _, parts in rows]
    names = max(len(name) for name, _ in rows) * LETTER + 8
    numbers = max(len(format_seconds(total)) for total in totals) * LETTER + 14
    room, step = width - names - numbers, 34
    scale = room / (max(totals) or 1.0)
    drawn = []
    for at, ((name, parts), total) in enumerate(zip(rows, totals, strict=True)):
        y, x = at * step + 6, names
        drawn.append(text(name, names - 8, y + 16, "strong", "end"))
        for number, stage in enumerate(series):
            length = parts.get(stage, 0.0) * scale
            told = tooltip(f"{name}, {stage}: {format_seconds(parts.get(stage, 0.0))}")
            part = element("rect", told, x=x, y=y, width=length, height=22, class_=series_class(number))
            drawn += [part] if length > 0 else []
            x += length
        drawn.append(text(format_seconds(total), x + 8, y + 16, "strong"))
    legend = Legend([(name, swatch(series_class(number))) for number, name in enumerate(series)], width)
    top = len(rows) * step + 18
    return figure(width, top + legend.height - 8, title, *drawn, legend.at(0, top))


def series_class(number: int) -> str:
    """The class that gives a series its colour."""
    return f"series-{min(number, SERIES - 1)}"


def format_seconds(value: float) -> str:
    """A duration as people say it: ``0.4 s``, ``37 s``, ``1 min 12 s``, ``2 h 03 min``."""
    if 0 < value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
