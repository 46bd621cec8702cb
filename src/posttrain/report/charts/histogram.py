"""A histogram of values, optionally with a highlighted subset."""

from collections.abc import Sequence
from itertools import pairwise

from posttrain.report.charts.chart import Chart, Formatter, Option, level_texts, ticks, value_axis
from posttrain.store.message import Message

_RECORDS = Message("records")


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    name: str,
    show: Formatter,
    *,
    above: int = 0,
    part: Sequence[int] = (),
    names: tuple[str, str] = ("all", "part"),
    small: bool = False,
) -> Chart | None:
    """Draws a bar for each bin; returns None if there is nothing to count.

    Args:
        edges: [B + 1], rising.
        counts: [B].
        name: name of the measure.
        show: formats a value.
        above: how many lie above the last edge.
        part: [B], counts of a subset, drawn in front.
        names: legend entries of the whole and the subset.
        small: for a grid of charts.
    """
    if not any(counts):
        return None
    first, last = float(edges[0]), float(edges[-1])
    levels = ticks(0, max(*counts, 3), 3, whole=True)
    layers = [(counts, names[0], "$old"), (part, names[1], "$blue")] if part else [(counts, _RECORDS, "$blue")]
    series: list[Option] = []
    for layer, what, colour in layers:
        items: list[Option] = [
            {"value": (low, high, count), "tip": _tip(show(low), show(high), count, what)}
            for (low, high), count in zip(pairwise(edges), layer, strict=True)
            if count
        ]
        encode = {"x": [0, 1], "y": 2}
        style = {"color": colour}
        series.append(
            {"type": "custom", "renderItem": "bin", "name": what, "encode": encode, "itemStyle": style, "data": items}
        )
    marked_values = [value for value in ticks(first, last, 4 if small else 6) if first <= value <= last]
    option: Option = {
        # ECharts reserves too little for labels at values of our own.
        "grid": {"top": 8, "bottom": 8},
        "xAxis": {
            **{"type": "value", "min": first, "max": last, "splitLine": {"show": False}},
            "texts": list(zip(marked_values, level_texts(marked_values, show), strict=True)),
            "axisLabel": {"customValues": marked_values},
        },
        "yAxis": value_axis(levels, "{:,.0f}".format),
        "tooltip": {"trigger": "item"},
        "series": series,
    }
    if part:
        option["legend"] = {"data": list(names)}
    ends = {"low": show(float(edges[0])), "high": show(float(edges[-1]))}
    beyond = Message("{count} above {high}", count=f"{above:,}", **ends) if above else ""
    all = f"{sum(counts) + above:,}"
    title = Message("{name}: {count} {of} from {low} to {high}", name=name, count=all, of=_RECORDS, **ends)
    columns = (Message("from"), Message("to"), *(names if part else (_RECORDS,)))
    counted = [counts, part] if part else [counts]
    table = [
        (show(low), show(high), *(f"{layer[at]:,}" for layer in counted))
        for at, (low, high) in enumerate(pairwise(edges))
        if counts[at]
    ]
    title = Message.joined(", ", filter(None, (title, beyond)))
    return Chart(title, option, 170 if small else 210, columns, table, heading=name, note=beyond)


def _tip(low: str, high: str, count: int, what: str) -> Message:
    if what == _RECORDS:
        return Message("{low} to {high}: {count} records", low=low, high=high, count=f"{count:,}")
    return Message("{low} to {high}: {count} {what}", low=low, high=high, count=f"{count:,}", what=what)
