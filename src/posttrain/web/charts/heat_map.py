"""Heat maps: a confusion matrix, and one strip a series over the steps of a training."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from posttrain.web.charts.curve import FloatArray, step_axis
from posttrain.web.charts.svg import LETTER, element, figure, text, tooltip, truncate


def heat_map(
    counts: Mapping[tuple[str, str], int],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    *,
    width: int = 760,
) -> str:
    """Draws a cell for each row and column, darker for greater counts; outlines cells whose row is their column.

    Args:
        counts: by row and column; a pair that is missing counts as 0.
    """
    if not rows or not columns:
        return ""
    names = min(max(map(len, rows)) * LETTER + 10, 0.42 * width)
    # Column names are turned by 55 degrees: upright ones would need a column as wide as the longest.
    slant = math.sin(math.radians(55))
    over = min(max(map(len, columns)) * LETTER, 160.0)
    head = over * slant + 14
    lean = over * math.cos(math.radians(55))
    size = max(min((width - names - lean) / len(columns), 64.0), 16.0)
    tall = min(size, 34.0)
    # Correct answers do not set the scale: they outnumber the mistakes that the map is about.
    most = max([counts.get((row, column), 0) for row in rows for column in columns if row != column] or [1]) or 1
    marks = []
    for at, column in enumerate(columns):
        x, y = names + at * size + size / 2, head - 6
        marks.append(text(truncate(column, over), x, y, "soft", "start", transform=f"rotate(-55 {x:.1f} {y:.1f})"))
    for down, row in enumerate(rows):
        y = head + down * tall
        marks.append(text(truncate(row, names - 4), names - 8, y + tall / 2 + 4, "", "end"))
        for at, column in enumerate(columns):
            marks.append(_cell(row, column, counts.get((row, column), 0), most, names + at * size, y, size, tall))
    return figure(width, head + len(rows) * tall + 4, title, *marks)


def _cell(row: str, column: str, count: int, most: int, x: float, y: float, size: float, tall: float) -> str:
    same = row == column
    share = 0.0 if same else count / most
    label = f"{row}: answered correctly {count} times" if same else f"{row} answered as {column}: {count}"
    box = {"x": x + 1, "y": y + 1, "width": size - 2, "height": tall - 2, "rx": 3}
    heat = element("rect", **box, class_="heat", fill_opacity=f"{share:.2f}") if share else ""
    number_class = "cell-strong" if share > 0.65 else "soft" if same else "cell"
    number = text(str(count), x + size / 2, y + tall / 2 + 4, number_class, "middle") if count else ""
    back = element("rect", **box, class_="same" if same else "track")
    return element("g", tooltip(label), back, heat, number)


_SHADES = 6
_BINS = 48


def strips(steps: FloatArray, series: Mapping[str, FloatArray], name: str, *, width: int = 760) -> str:
    """Draws one strip a series over the steps, shaded by the log median of each of at most 48 stretches.

    Args:
        steps: float64 [N], rising.
        series: float64 [N] by name, in the order in which they are drawn; NaN and zero stay empty.
        name: name of the measure.
    """
    stretches = np.array_split(np.arange(len(steps)), min(_BINS, len(steps)))
    levels = np.array([[_log_median(values[stretch]) for stretch in stretches] for values in series.values()])
    finite = levels[~np.isnan(levels)] if levels.size else levels
    if not finite.size:
        return ""
    low, high = float(finite.min()), float(finite.max())
    share = np.nan_to_num((levels - low) / ((high - low) or 1))
    # A little under _SHADES, so that the largest value falls into the last shade and not beyond it.
    shades = np.where(np.isnan(levels), 0, 1 + (share * (_SHADES - 0.01)).astype(int))
    names = min(max(len(group) for group in series) * LETTER + 12, 0.36 * width)
    tall = 18 if len(series) <= 16 else 12 if len(series) <= 48 else 7
    every = math.ceil(13 / tall)
    top, cell = 28.0, (width - names - 12) / len(stretches)
    name_labels, boxes = [], []
    for row, (group, values) in enumerate(series.items()):
        y = top + row * tall
        if row % every == 0:
            size = "soft" if tall >= 18 else "soft small"
            name_labels.append(text(truncate(group, names - 8), names - 8, y + tall / 2 + 4, size, "end"))
        label = tooltip(_strip_label(group, values))
        boxes.append(element("rect", label, x=names, y=y, width=width - names - 12, height=tall, class_="hover"))
    fills = [
        element(
            "path",
            d=_cell_path(shades == shade, names, top, cell, tall),
            class_="heat",
            fill_opacity=f"{0.08 + 0.92 * (shade - 1) / (_SHADES - 1):.2f}",
        )
        for shade in range(1, _SHADES + 1)
    ]
    bottom = top + len(series) * tall
    return figure(
        width,
        bottom + 46,
        f"{name} of {len(series)} groups by step, {10**low:.2g} to {10**high:.2g}; the table below has the numbers",
        text(name, 4, 14, "strong"),
        *name_labels,
        *fills,
        *boxes,
        *step_axis(float(steps[0]), float(steps[-1]), names, width - 12.0, bottom + 16),
        _shade_key(low, high, names, bottom + 34),
    )


def _log_median(values: FloatArray) -> float:
    """Returns the log10 of the median of the positive values; NaN without any."""
    # A zero norm has no logarithm; an empty cell shows it better than a floor would.
    positive = values[values > 0]
    return float(np.log10(np.median(positive))) if positive.size else math.nan


def _cell_path(cells: np.ndarray, left: float, top: float, cell: float, tall: float) -> str:
    """Builds a path around the true cells [rows, columns], merging neighbours in a row."""
    path = []
    for row, line in enumerate(cells):
        # Runs of equal cells share one path segment, which keeps pages with many layers small.
        edges = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(int), [0]])))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            x, wide = left + start * cell, (end - start) * cell
            path.append(f"M{x:.1f} {top + row * tall:.0f}h{wide:.1f}v{tall - 1}h-{wide:.1f}z")
    return "".join(path)


def _shade_key(low: float, high: float, left: float, y: float) -> str:
    start, end = f"{10**low:.2g}", f"{10**high:.2g}"
    x = left + len(start) * LETTER
    boxes = [
        element(
            "rect",
            x=x + 14 * shade,
            y=y - 2,
            width=14,
            height=10,
            class_="heat",
            fill_opacity=f"{0.08 + 0.92 * shade / (_SHADES - 1):.2f}",
        )
        for shade in range(_SHADES)
    ]
    ends = text(start, left, y + 8, "soft small"), text(end, x + 14 * _SHADES + 6, y + 8, "soft small")
    return ends[0] + "".join(boxes) + ends[1]


def _strip_label(group: str, values: FloatArray) -> str:
    finite = values[~np.isnan(values)]
    if not finite.size:
        return f"{group}: not measured"
    return f"{group}: median {np.median(finite):.2g}, from {finite.min():.2g} to {finite.max():.2g}"
