"""A histogram of values, optionally with a highlighted subset and a marked value."""

from collections.abc import Sequence

from posttrain.web.charts.svg import (
    LETTER,
    Formatter,
    Legend,
    Scale,
    element,
    figure,
    level_lines,
    level_words,
    swatch,
    text,
    ticks,
    tooltip,
    truncate,
)


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    name: str,
    show: Formatter,
    *,
    of: str = "records",
    above: int = 0,
    mark: tuple[float, str] | None = None,
    part: Sequence[int] = (),
    names: tuple[str, str] = ("all", "part"),
    width: int = 760,
) -> str:
    """Draws a bar for each bin; returns "" if there is nothing to count.

    Args:
        edges: [B + 1], rising.
        counts: [B].
        name: name of the measure.
        show: formats a value.
        of: the unit of the counts.
        above: how many lie above the last edge.
        mark: a value and its label, drawn as a line; the axis reaches it.
        part: [B], counts of a subset, drawn in front.
        names: legend entries of the whole and the subset.
    """
    if not any(counts):
        return ""
    first, last = float(edges[0]), float(edges[-1])
    # The marked value may lie outside of the counts, and must be visible all the same.
    if mark:
        room = 0.03 * (last - first)
        first, last = min(first, mark[0] - room), max(last, mark[0] + room)
    levels = ticks(0, max(counts), 3)
    legend = Legend(list(zip(names, (swatch("bar-old"), swatch("bar-a")), strict=True)) if part else [], width)
    left = max(len(f"{level:,.0f}") for level in levels) * LETTER + 12
    right, top = width - 14.0, 50.0 if mark else 32.0
    bottom = top + (150 if width >= 500 else 110)

    def x(value: float) -> float:
        return left + (right - left) * (value - first) / (last - first)

    def y(count: float) -> float:
        return bottom - (bottom - top) * count / levels[-1]

    # Counts are integers: half a record is no level.
    grid = level_lines([level for level in levels if level == int(level)], left, right, y, "{:,.0f}".format)
    marks = []
    layers = [(counts, of, "bar-old"), (part, f"{of}, {names[1]}", "bar-a")] if part else [(counts, of, "bar-a")]
    for layer, what, class_ in layers:
        for low, high, count in zip(edges[:-1], edges[1:], layer, strict=True):
            if count:
                label = tooltip(f"{show(low)} to {show(high)}: {count:,} {what}")
                # A bin with a single record stays visible next to one with a million.
                tall = max(bottom - y(count), 1.0)
                wide = max(x(high) - x(low) - 1, 1.0)
                at = {"x": x(low) + 0.5, "y": bottom - tall, "width": wide, "height": tall}
                marks.append(element("rect", label, **at, class_=class_))
    beyond = f"{above:,} above {show(float(edges[-1]))}" if above else ""
    room = right - 4 - len(beyond) * LETTER
    return figure(
        width,
        bottom + 26 + (legend.height if part else 0),
        f"{name}: {sum(counts) + above:,} {of} from {show(float(edges[0]))} to {show(float(edges[-1]))}"
        + (f", {beyond}" if above else ""),
        text(truncate(name, room), 4, 14, "strong"),
        *([text(beyond, right, 14, "soft small", "end")] if above else []),
        *grid,
        *marks,
        *level_words(
            [value for value in ticks(first, last, 5) if first <= value <= last], x, show, left, right, bottom + 18
        ),
        *(_mark(*mark, x, top, bottom, width) if mark else []),
        legend.at(left, bottom + 38),
    )


def _mark(value: float, label: str, x: Scale, top: float, bottom: float, width: float) -> list[str]:
    at, room = x(value), len(label) * LETTER / 2
    return [
        element("line", x1=at, x2=at, y1=top - 10, y2=bottom, class_="mark-line"),
        text(label, min(max(at, room + 4), width - room - 4), top - 15, "strong", "middle"),
    ]
