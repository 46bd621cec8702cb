"""Two thin bars a name: what was, and what is."""

from collections.abc import Sequence

from posttrain.web.charts.svg import LETTER, Formatter, Legend, element, figure, swatch, text, tooltip, truncate


def paired_bars(
    rows: Sequence[tuple[str, float, float]],
    title: str,
    show: Formatter,
    *,
    names: tuple[str, str] = ("before", "after"),
    width: int = 760,
) -> str:
    """Both values of each row on one scale, with their words beside them.

    Args:
        rows: name, what was and what is, both at least 0.
        show: a value in words.
        names: what the first and the second bar are, for the legend.
    """
    if not rows:
        return ""
    words = [(show(before), show(after)) for _, before, after in rows]
    labels = min(max(len(name) for name, _, _ in rows) * LETTER + 14, 0.46 * width)
    numbers = max(len(one) for pair in words for one in pair) * LETTER + 10
    room, step, top = width - labels - numbers, 34, 26
    scale = room / (max(max(before, after) for _, before, after in rows) or 1.0)
    drawn = []
    for at, (name, *values) in enumerate(rows):
        y = top + at * step
        row = [
            tooltip(f"{name}: {names[0]} {words[at][0]}, {names[1]} {words[at][1]}"),
            text(truncate(name, labels - 12), labels - 8, y + 18, "", "end"),
        ]
        for second, (value, told, class_) in enumerate(zip(values, words[at], ("bar-old", "bar-a"), strict=True)):
            line = y + 2 + 13 * second
            row.append(element("rect", x=labels, y=line, width=room, height=11, rx=2, class_="track"))
            row.append(element("rect", x=labels, y=line, width=value * scale, height=11, rx=2, class_=class_))
            row.append(text(told, labels + room + 8, line + 10, "small" if second else "soft small"))
        drawn.append(element("g", *row))
    legend = Legend([(name, swatch(class_)) for name, class_ in zip(names, ("bar-old", "bar-a"), strict=True)], width)
    return figure(width, top + len(rows) * step + 2, title, legend.at(0, 8), *drawn)
