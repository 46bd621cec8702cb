"""Bar charts: one or two values a name, parts of a whole, and funnels of records that steps reject."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import sub

from markupsafe import Markup

from posttrain.web.charts.svg import (
    LETTER,
    Formatter,
    Legend,
    element,
    figure,
    responsive,
    swatch,
    text,
    tooltip,
    truncate,
    without_step,
)

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
    """Draws one horizontal bar a row, in the order given.

    Args:
        rows: name, length and the label beside the bar.
        full: the value of a bar that fills its track; the greatest value if left out.
        kind: colour of the bars, ``a`` or ``b``.
        classes: of each bar, where they do not all have one colour.
        marks: one or two values, rising, with their labels, drawn as lines across all bars.
    """
    if not rows:
        return ""
    # Long names are truncated at half the width, so that bars stay comparable on a phone.
    names = min(max(len(name) for name, _, _ in rows) * LETTER + 14, 0.46 * width)
    numbers = max(len(label) for _, _, label in rows) * LETTER + 14
    room, step = width - names - numbers, 24 if len(rows) <= 32 else 18
    # 1.0 if all bars are zero, which have no length but must not divide by zero.
    most = full or max(value for _, value, _ in rows) or 1.0
    top = 22 if marks else 0
    colours = classes or [f"bar-{kind}"] * len(rows)
    shapes = []
    for at, (name, value, label) in enumerate(rows):
        y, length = top + at * step + 4, room * min(value / most, 1.0)
        shapes += [
            element(
                "g",
                tooltip(f"{name}: {label}"),
                text(truncate(name, names - 12), names - 8, y + 13, "", "end"),
                element("rect", x=names, y=y + 2, width=room, height=14, rx=3, class_="track"),
                element("rect", x=names, y=y + 2, width=length, height=14, rx=3, class_=colours[at]),
                text(label, names + room + 8, y + 13, "strong"),
            )
        ]
    bottom = top + len(rows) * step + 4
    for at, (value, label) in enumerate(marks):
        x = names + room * min(value / most, 1.0)
        # Two labels point away from each other, or they would touch.
        anchor = "middle" if len(marks) == 1 else "start" if at else "end"
        shapes.append(element("line", x1=x, x2=x, y1=top - 2, y2=bottom, class_="mark-line"))
        shapes.append(text(label, x, 12, "soft small", anchor))
    return figure(width, bottom, title, *shapes)


def count_rows(counts: Iterable[tuple[str, int]]) -> list[tuple[str, float, str]]:
    """Turns names and counts into rows for `bars`."""
    return [(name, float(count), f"{count:,}") for name, count in counts]


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], series: Sequence[str], title: str, *, width: int = 760
) -> str:
    """Draws one bar a row, divided into the series' seconds, with the row's total beside it.

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
    marks = []
    for at, ((name, parts), total) in enumerate(zip(rows, totals, strict=True)):
        y, x = at * step + 6, names
        marks.append(text(name, names - 8, y + 16, "strong", "end"))
        for number, stage in enumerate(series):
            length = parts.get(stage, 0.0) * scale
            title_element = tooltip(f"{name}, {stage}: {format_seconds(parts.get(stage, 0.0))}")
            part = element("rect", title_element, x=x, y=y, width=length, height=22, class_=series_class(number))
            # A part of no length would have a tooltip that no pointer reaches.
            marks += [part] if length > 0 else []
            x += length
        marks.append(text(format_seconds(total), x + 8, y + 16, "strong"))
    legend = Legend([(name, swatch(series_class(number))) for number, name in enumerate(series)], width)
    top = len(rows) * step + 18
    return figure(width, top + legend.height - 8, title, *marks, legend.at(0, top))


def series_class(number: int) -> str:
    """Returns the CSS class that gives a series its colour."""
    return f"series-{min(number, SERIES - 1)}"


def format_seconds(value: float) -> str:
    """Formats a duration: ``0.4 s``, ``37 s``, ``1 min 12 s``, ``2 h 03 min``."""
    # From 9.95 on a tenth would be rounded to 10.0 s.
    if 0 < value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def paired_bars(
    rows: Sequence[tuple[str, float, float]],
    title: str,
    show: Formatter,
    *,
    names: tuple[str, str] = ("before", "after"),
    width: int = 760,
) -> str:
    """Draws two thin bars a row on one scale, with their values beside them.

    Args:
        rows: name, value before and value after, both at least 0.
        show: formats a value.
        names: legend entries of the first and the second bar.
    """
    if not rows:
        return ""
    value_labels = [(show(before), show(after)) for _, before, after in rows]
    labels = min(max(len(name) for name, _, _ in rows) * LETTER + 14, 0.46 * width)
    numbers = max(len(label) for pair in value_labels for label in pair) * LETTER + 10
    room, step, top = width - labels - numbers, 34, 26
    scale = room / (max(max(before, after) for _, before, after in rows) or 1.0)
    marks = []
    for at, (name, *values) in enumerate(rows):
        y = top + at * step
        row = [
            tooltip(f"{name}: {names[0]} {value_labels[at][0]}, {names[1]} {value_labels[at][1]}"),
            text(truncate(name, labels - 12), labels - 8, y + 18, "", "end"),
        ]
        for second, (value, label, class_) in enumerate(
            zip(values, value_labels[at], ("bar-old", "bar-a"), strict=True)
        ):
            line = y + 2 + 13 * second
            row.append(element("rect", x=labels, y=line, width=room, height=11, rx=2, class_="track"))
            row.append(element("rect", x=labels, y=line, width=value * scale, height=11, rx=2, class_=class_))
            row.append(text(label, labels + room + 8, line + 10, "small" if second else "soft small"))
        marks.append(element("g", *row))
    legend = Legend([(name, swatch(class_)) for name, class_ in zip(names, ("bar-old", "bar-a"), strict=True)], width)
    return figure(width, top + len(rows) * step + 2, title, legend.at(0, 8), *marks)


def funnel(start: int, rejected: Sequence[tuple[str, int]], title: str, *, width: int = 760) -> str:
    """Draws a bar for the records read, a segment cut off for each rejection reason, and a bar for those kept.

    Args:
        start: number of records read.
        rejected: reason and records, in the order of the steps; below zero for records that a step added.
    """
    accepted = start - sum(count for _, count in rejected)
    names = min(max([18, *(len(reason) for reason, _ in rejected)]) * LETTER + 10, 0.4 * width)
    room, step = width - names - 70, 28
    # Steps may add records (a negative count): the widest bar is not always the first.
    most = max(accumulate((count for _, count in rejected), sub, initial=start))
    scale = room / (most or 1)
    marks, remaining = [], start
    rows = [("came in", start, 0, "bar-a"), *((reason, count, 1, "cut") for reason, count in rejected)]
    for at, (name, count, is_cut, class_) in enumerate([*rows, ("kept", accepted, 0, "bar-kept")]):
        y = at * step + 4
        x = names + (remaining - max(count, 0)) * scale if is_cut else names
        remaining -= count if is_cut else 0
        # One record of a million is still visible, as two pixels.
        length = max(abs(count) * scale, 2.0 if count else 0.0)
        share = f"{100 * abs(count) / start:.1f}%" if start else "none"
        label = f"{-count:+,}".replace("-", "−") if is_cut and count else f"{count:,}"
        class_ = "bar-a" if count < 0 else class_
        marks.append(
            element(
                "g",
                tooltip(f"{name}: {abs(count):,} records{' added' if count < 0 else ''}, {share} of what came in"),
                text(truncate(name, names - 4), names - 8, y + 15, "" if is_cut else "strong", "end"),
                element("rect", x=names, y=y + 3, width=room, height=16, rx=3, class_="track"),
                element("rect", x=x, y=y + 3, width=length, height=16, rx=3, class_=class_),
                text(label, names + room + 8, y + 15, "strong"),
            )
        )
    return figure(width, (len(rows) + 1) * step + 4, title, *marks)


def funnel_charts(counts: Sequence[tuple[str, str | None, int]]) -> Iterator[tuple[str, Markup]]:
    """Yields each set's name and funnel.

    Args:
        counts: set, rejection reason (None for the records read) and number of records; in the order
            of the steps.
    """
    for name in dict.fromkeys(of for of, _, _ in counts):
        rows = [(reason, count) for of, reason, count in counts if of == name]
        start = sum(count for reason, count in rows if reason is None)
        rejected = [(reason, count) for reason, count in rows if reason is not None]
        yield name, responsive(_funnel_chart, start, rejected, f"records of {name}: in, rejected by reason, kept")


def _funnel_chart(start: int, rejected: Iterable[tuple[str, int]], title: str, width: int) -> str:
    return funnel(start, [(without_step(name, width), count) for name, count in rejected], title, width=width)
