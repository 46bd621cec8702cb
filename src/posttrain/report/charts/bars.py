"""Bar charts: one or two values a name, parts of a whole, and funnels of records that steps reject."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import sub

from posttrain.report.charts.chart import Chart, Formatter, Option, name_axis, series_colour, side_labels
from posttrain.store.message import Message

_ROW = 24
_KEPT = Message("kept")
_TRACK: Option = {"showBackground": True, "backgroundStyle": {"color": "$track", "borderRadius": 3}}


def bars(
    rows: Sequence[tuple[str, float, str]],
    title: str,
    *,
    full: float | None = None,
    colour: str = "$blue",
    colours: Sequence[str] = (),
    marks: Sequence[tuple[float, str]] = (),
    columns: tuple[str, str] = (Message("name"), Message("value")),
) -> Chart | None:
    """Draws one horizontal bar a row, in the order given; returns None without rows.

    Args:
        rows: name, length and the label beside the bar.
        full: the value of a bar that fills its track; the greatest value if left out.
        colour: of all bars.
        colours: of each bar, where they do not all have one.
        marks: values with their labels, drawn as lines across all bars.
        columns: names of the two columns of the table.
    """
    if not rows:
        return None
    # 1.0 if all bars are zero, which have no length but must not divide by zero.
    most = full or max(value for _, value, _ in rows) or 1.0
    items: list[Option] = [{"value": min(value, most), "tip": _tip(name, label)} for name, value, label in rows]
    for item, own in zip(items, colours, strict=False):
        item["itemStyle"] = {"color": own}
    series = _bar_series("", items, colour, **_TRACK)
    if marks:
        series["markLine"] = _mark_lines([(min(value, most), label) for value, label in marks])
    option = _rows_option([name for name, _, _ in rows], [label for _, _, label in rows], most, [series])
    # The labels of the marks stand above the first row.
    top = 22 if marks else 0
    option["grid"] = {"top": top}
    table = [(name, label) for name, _, label in rows]
    return Chart(title, option, _rows_height(len(rows)) + top, columns, table)


def count_rows(counts: Iterable[tuple[str, int]]) -> list[tuple[str, float, str]]:
    """Turns names and counts into rows for `bars`."""
    return [(name, float(count), f"{count:,}") for name, count in counts]


def _tip(name: str, label: str) -> Message:
    return Message("{name}: {label}", name=name, label=label)


def _mark_lines(marks: Sequence[tuple[float, str]]) -> Option:
    """Builds dashed lines across the x axis, each with its label at the top: the axis is inverted."""
    # Labels of two lines point away from each other, or they would touch.
    sides = ("right", "left") if len(marks) == 2 else ("center",) * len(marks)
    data = [
        {"xAxis": value, "tip": label, "label": {"formatter": label, "align": side}}
        for (value, label), side in zip(marks, sides, strict=True)
    ]
    line = {"color": "$red", "type": [3, 3], "width": 1.5}
    return {
        "symbol": "none",
        "silent": True,
        "lineStyle": line,
        "label": {"color": "$soft", "position": "start"},
        "data": data,
    }


def _bar_series(name: str, items: Sequence[Option | float | None], colour: str, **others: object) -> Option:
    style = {"color": colour, "borderRadius": 3}
    return {"type": "bar", "name": name, "data": items, "itemStyle": style, "barWidth": 14, **others}


def _rows_option(names: Sequence[str], labels: Sequence[str], most: float, series: Sequence[Option]) -> Option:
    """Builds horizontal bars with their names at the left and their labels in a column at the right."""
    return {
        "grid": {"top": 0},
        "xAxis": {"type": "value", "min": 0, "max": most, "show": False},
        "yAxis": [name_axis(names, axisLine={"show": False}), side_labels(labels)],
        "tooltip": {"trigger": "axis", "axisPointer": {"type": "shadow"}},
        "series": list(series),
    }


def _rows_height(count: int) -> int:
    return (_ROW if count <= 32 else 18) * count + 8


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], series: Sequence[str], title: str) -> Chart | None:
    """Draws one bar a row, divided into the series' seconds, with the row's total beside it.

    Args:
        rows: name and seconds by series; a series that is missing counts as none.
        series: every series, in the order in which they stand in the bar and in the legend.
    """
    if not rows or not series:
        return None
    totals = [sum(parts.get(name, 0.0) for name in series) for _, parts in rows]
    labels = [format_seconds(total) for total in totals]
    drawn = []
    for number, stage in enumerate(series):
        items: list[Option | None] = [
            # A part of no length would have a line in the tooltip that says nothing.
            {"value": parts[stage], "tip": _tip(stage, format_seconds(parts[stage]))} if parts.get(stage) else None
            for _, parts in rows
        ]
        drawn.append(_bar_series(stage, items, series_colour(number), stack="all") | {"barWidth": 22})
        # The radius belongs to the ends of the whole bar.
        drawn[-1]["itemStyle"]["borderRadius"] = 0
    option = _rows_option([name for name, _ in rows], labels, max(totals) or 1.0, drawn)
    option["legend"] = {"data": list(series)}
    table = [
        (name, *(format_seconds(parts.get(stage, 0.0)) for stage in series), label)
        for (name, parts), label in zip(rows, labels, strict=True)
    ]
    return Chart(title, option, 34 * len(rows) + 8, ("", *series, Message("all")), table)


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
) -> Chart | None:
    """Draws two thin bars a row on one scale, with their values beside them; returns None without rows.

    Args:
        rows: name, value before and value after, both at least 0.
        show: formats a value.
        names: legend entries of the first and the second bar.
    """
    if not rows:
        return None
    series = []
    values = [before for _, before, _ in rows], [after for _, _, after in rows]
    for name, colour, of_name in zip(names, ("$old", "$blue"), values, strict=True):
        items: list[Option] = [
            {"value": value, "tip": f"{row[0]}, {name}: {show(value)}"}
            for row, value in zip(rows, of_name, strict=True)
        ]
        series.append(_bar_series(name, items, colour, **_TRACK) | {"barWidth": 10, "barGap": "20%"})
    labels = [f"{show(before)} → {show(after)}" for _, before, after in rows]
    most = max(max(before, after) for _, before, after in rows) or 1.0
    option = _rows_option([name for name, _, _ in rows], labels, most, series)
    option["legend"] = {"data": list(names)}
    table = [(name, show(before), show(after)) for name, before, after in rows]
    return Chart(title, option, 34 * len(rows) + 8, ("", *names), table)


def funnel(start: int, rejected: Sequence[tuple[str, int]], title: str) -> Chart:
    """Draws a bar for the records read, a segment cut off for each rejection reason, and a bar for those kept.

    Args:
        start: number of records read.
        rejected: reason and records, in the order of the steps; below zero for records that a step added.
    """
    kept = start - sum(count for _, count in rejected)
    # Steps may add records (a negative count): the widest bar is not always the first.
    most = max(accumulate((count for _, count in rejected), sub, initial=start)) or 1
    rows = [(Message("came in"), start, "$blue"), *((reason, count, "$red") for reason, count in rejected)]
    offsets: list[Option | float | None] = []
    items: list[Option | float | None] = []
    labels, shares, remaining = [], [], start
    for name, count, colour in [*rows, (_KEPT, kept, "$green")]:
        is_cut = colour == "$red"
        offsets.append(remaining - max(count, 0) if is_cut else 0)
        remaining -= count if is_cut else 0
        shares.append(f"{100 * abs(count) / start:.1f}%" if start else Message("none"))
        labels.append(f"{-count:+,}".replace("-", "−") if is_cut and count else f"{count:,}")
        template = "{name}: {count} records, {share} of what came in"
        if count < 0:
            template = "{name}: {count} records added, {share} of what came in"
        tip = Message(template, name=name, count=f"{abs(count):,}", share=shares[-1])
        # Not drawn without records: a bar of at least two pixels would claim that there is one.
        style = {"color": "$blue" if count < 0 else colour}
        items.append({"value": abs(count) or None, "tip": tip, "itemStyle": style})
    series = [
        _bar_series("before", offsets, "transparent", stack="all", silent=True, **_TRACK),
        # One record of a million is still visible, as two pixels.
        _bar_series("records", items, "$blue", stack="all", barMinHeight=2),
    ]
    names = [name for name, _, _ in rows] + [_KEPT]
    option = _rows_option(names, labels, most, series)
    table = list(zip(names, labels, shares, strict=True))
    columns = ("", Message("records"), Message("of what came in"))
    return Chart(title, option, 28 * len(names) + 8, columns, table)


def funnel_charts(counts: Sequence[tuple[str, str | None, int]]) -> Iterator[tuple[str, Chart]]:
    """Yields each set's name and funnel.

    Args:
        counts: set, rejection reason (None for the records read) and number of records; in the order
            of the steps.
    """
    for name in dict.fromkeys(of for of, _, _ in counts):
        rows = [(reason, count) for of, reason, count in counts if of == name]
        start = sum(count for reason, count in rows if reason is None)
        rejected = [(reason, count) for reason, count in rows if reason is not None]
        yield name, funnel(start, rejected, Message("records of {name}: in, rejected by reason, kept", name=name))
