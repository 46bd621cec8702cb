"""A heat map of counts: which answers are given in place of which."""

import math
from collections.abc import Mapping, Sequence

from posttrain.web.charts.svg import LETTER, element, figure, text, tooltip, truncate


def heat_map(
    counts: Mapping[tuple[str, str], int],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    *,
    width: int = 760,
) -> str:
    """A cell for each row and column, darker the greater its count; where both are the same, outlined.

    Args:
        counts: by row and column; a pair that is missing counts as 0.
    """
    if not rows or not columns:
        return ""
    names = min(max(map(len, rows)) * LETTER + 10, 0.42 * width)
    slant = math.sin(math.radians(55))
    over = min(max(map(len, columns)) * LETTER, 160.0)
    head = over * slant + 14
    lean = over * math.cos(math.radians(55))
    size = max(min((width - names - lean) / len(columns), 64.0), 16.0)
    tall = min(size, 34.0)
    most = max([counts.get((row, column), 0) for row in rows for column in columns if row != column] or [1]) or 1
    drawn = []
    for at, column in enumerate(columns):
        x, y = names + at * size + size / 2, head - 6
        drawn.append(text(truncate(column, over), x, y, "soft", "start", transform=f"rotate(-55 {x:.1f} {y:.1f})"))
    for down, row in enumerate(rows):
        y = head + down * tall
        drawn.append(text(truncate(row, names - 4), names - 8, y + tall / 2 + 4, "", "end"))
        for at, column in enumerate(columns):
            drawn.append(_cell(row, column, counts.get((row, column), 0), most, names + at * size, y, size, tall))
    return figure(width, head + len(rows) * tall + 4, title, *drawn)


def _cell(row: str, column: str, count: int, most: int, x: float, y: float, size: float, tall: float) -> str:
    same = row == column
    share = 0.0 if same else count / most
    words = f"{row}: answered correctly {count} times" if same else f"{row} answered as {column}: {count}"
    box = {"x": x + 1, "y": y + 1, "width": size - 2, "height": tall - 2, "rx": 3}
    heat = element("rect", **box, class_="heat", fill_opacity=f"{share:.2f}") if share else ""
    number_class = "cell-strong" if share > 0.65 else "soft" if same else "cell"
    number = text(str(count), x + size / 2, y + tall / 2 + 4, number_class, "middle") if count else ""
    back = element("rect", **box, class_="same" if same else "track")
    return element("g", tooltip(words), back, heat, number)
