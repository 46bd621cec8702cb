"""A histogram: how many there are of each size."""

from collections.abc import Sequence

from posttrain.web.charts.svg import LETTER, Scale, Show, element, figure, level_lines, shortened, text, ticks, tooltip


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    name: str,
    show: Show,
    *,
    of: str = "records",
    above: int = 0,
    mark: tuple[float, str] | None = None,
    width: int = 760,
) -> str:
    """A bar for each bin on an axis of values; empty where there is nothing to count.

    Args:
        edges: [B + 1], rising.
        counts: [B].
        name: what is measured.
        show: a value in words.
        of: what is counted.
        above: how many lie above the last edge.
        mark: a value with words for it, drawn as a line; the axis reaches it.
    """
    if not any(counts):
        return ""
    first, last = float(edges[0]), float(edges[-1])
    if mark:
        room = 0.03 * (last - first)
        first, last = min(first, mark[0] - room), max(last, mark[0] + room)
    levels = ticks(0, max(counts), 3)
    left = max(len(f"{level:,.0f}") for level in levels) * LETTER + 12
    right, top = width - 14.0, 50.0 if mark else 32.0
    bottom = top + (150 if width >= 500 else 110)

    def x(value: float) -> float:
        return left + (right - left) * (value - first) / (last - first)

    def y(count: float) -> float:
        return bottom - (bottom - top) * count / levels[-1]

    grid = level_lines([level for level in levels if level == int(level)], left, right, y, "{:,.0f}".format)
    drawn = []
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            told = tooltip(f"{show(low)} to {show(high)}: {count:,} {of}")
            tall = max(bottom - y(count), 1.0)
            box = {"x": x(low) + 0.5, "y": bottom - tall, "width": max(x(high) - x(low) - 1, 1.0), "height": tall}
            drawn.append(element("rect", told, **box, class_="bar-a"))
    beyond = f"{above:,} above {show(float(edges[-1]))}" if above else ""
    room = right - 4 - len(beyond) * LETTER
    return figure(
        width,
        bottom + 26,
        f"{name}: {sum(counts) + above:,} {of} from {show(float(edges[0]))} to {show(float(edges[-1]))}"
        + (f", {beyond}" if above else ""),
        text(shortened(name, room), 4, 14, "strong"),
        *([text(beyond, right, 14, "soft small", "end")] if above else []),
        *grid,
        *drawn,
        *_axis(first, last, x, show, left, right, bottom + 18),
        *(_mark(*mark, x, top, bottom, width) if mark else []),
    )


def _axis(first: float, last: float, x: Scale, show: Show, left: float, right: float, y: float) -> list[str]:
    """Round values that do not touch."""
    drawn, free = [], left - 12.0
    for value in ticks(first, last, 5):
        words = show(value)
        half = len(words) * LETTER / 2
        at = x(value)
        if first <= value <= last and at - half >= free and at + half <= right + 14:
            drawn.append(text(words, at, y, "soft", "middle"))
            free = at + half + 6
    return drawn


def _mark(value: float, words: str, x: Scale, top: float, bottom: float, width: float) -> list[str]:
    at, room = x(value), len(words) * LETTER / 2
    return [
        element("line", x1=at, x2=at, y1=top - 10, y2=bottom, class_="mark-line"),
        text(words, min(max(at, room + 4), width - room - 4), top - 15, "strong", "middle"),
    ]
