"""Heat maps: a confusion matrix, and one strip a series over the steps of a training."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from posttrain.report.charts.chart import Chart, Option, name_axis
from posttrain.report.charts.curve import FloatArray
from posttrain.store.message import Message

_SHADES = 6


def heat_map(
    counts: Mapping[tuple[str, str], int], rows: Sequence[str], columns: Sequence[str], title: str
) -> Chart | None:
    """Draws a cell for each row and column, darker for greater counts; outlines cells whose row is their column.

    Args:
        counts: by row and column; a pair that is missing counts as 0.
    """
    if not rows or not columns:
        return None
    # Correct answers do not set the scale: they outnumber the mistakes that the map is about.
    most = max([counts.get((row, column), 0) for row in rows for column in columns if row != column] or [1]) or 1
    cells = [
        _cell(at, down, row, column, counts.get((row, column), 0), most)
        for down, row in enumerate(rows)
        for at, column in enumerate(columns)
    ]
    label = {"interval": 0, "rotate": -50}
    option: Option = {
        "grid": {"top": 0},
        "xAxis": {**{"type": "category", "position": "top", "data": list(columns)}, "axisLabel": label},
        "yAxis": name_axis(rows, axisLine={"show": False}),
        # The shades of zero and of the greatest count.
        "visualMap": {"show": False, "min": 0, "max": most, "dimension": 2, "inRange": {"color": ["$track", "$blue"]}},
        "tooltip": {"trigger": "item"},
        "series": [
            {
                **{"type": "heatmap", "data": cells, "label": {"show": True}},
                "itemStyle": {"borderColor": "$paper", "borderWidth": 2, "borderRadius": 3},
            }
        ],
    }
    table = [(row, *(f"{counts.get((row, column), 0):,}" for column in columns)) for row in rows]
    return Chart(title, option, 130 + 32 * len(rows), ("", *columns), table)


def _cell(at: int, down: int, row: str, column: str, count: int, most: int) -> Option:
    template = "{row} answered as {column}: {count}" if row != column else "{row}: answered correctly {count} times"
    tip = Message(template, row=row, column=column, count=count)
    item: Option = {"value": (at, down, count), "text": str(count) if count else "", "tip": tip}
    if row == column:
        outline = {"color": "$paper", "borderColor": "$grid", "borderWidth": 1}
        return item | {"visualMap": False, "itemStyle": outline, "label": {"color": "$soft"}}
    strong = count > 0.55 * most
    return item | {"label": {"color": "$paper" if strong else "$ink", "fontWeight": 600 if strong else 400}}


def strips(steps: FloatArray, series: Mapping[str, FloatArray], name: str, cells: int = 8000) -> Chart | None:
    """Draws one strip a series over the steps, shaded by the median of each of at most 48 stretches.

    Args:
        steps: float64 [N], rising.
        series: float64 [N] by name, in the order in which they are drawn; NaN and zero stay empty.
        name: name of the measure.
        cells: most cells of all strips together.
    """
    bins = max(min(48, len(steps), cells // max(len(series), 1)), 1)
    stretches = np.array_split(np.arange(len(steps)), bins)
    medians = np.array([[_median(values[stretch]) for stretch in stretches] for values in series.values()])
    finite = medians[~np.isnan(medians)] if medians.size else medians
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    starts = [f"{int(steps[stretch[0]]):,}" for stretch in stretches]
    shaded = [
        (at, down, float(f"{value:.3g}"))
        for down, line in enumerate(medians)
        for at, value in enumerate(line)
        if not np.isnan(value)
    ]
    tall = 18 if len(series) <= 16 else 12 if len(series) <= 48 else 7
    option: Option = {
        "grid": {"top": 4, "bottom": 26},
        "xAxis": {**{"type": "category", "data": starts, "name": Message("from step")}, "nameLocation": "middle"},
        "yAxis": name_axis(series, axisLabel={"interval": math.ceil(14 / tall) - 1}, axisLine={"show": False}),
        "visualMap": {
            **{"type": "piecewise", "pieces": _shades(low, high), "orient": "horizontal", "left": 0, "bottom": 0},
            **{
                "dimension": 2,
                "showLabel": False,
                "text": [f"{high:.2g}", f"{low:.2g}"],
                "textStyle": {"color": "$soft"},
            },
            **{"itemWidth": 16, "itemHeight": 10, "itemGap": 0, "hoverLink": False, "selectedMode": False},
        },
        "tooltip": {"trigger": "item"},
        "series": [{"type": "heatmap", "data": shaded, "itemStyle": {"borderColor": "$paper", "borderWidth": 0.5}}],
    }
    template = "{name} of {count} groups by step, {low:.2g} to {high:.2g}; the table below has the numbers"
    title = Message(template, name=name, count=len(series), low=low, high=high)
    table = [(group, *_range(values)) for group, values in series.items()]
    columns = ("", Message("median"), Message("smallest"), Message("greatest"))
    return Chart(title, option, 80 + tall * len(series), columns, table, heading=name)


def _median(values: FloatArray) -> float:
    """Returns the median of the positive values; NaN without any."""
    # A zero norm has no logarithm; an empty cell shows it better than a floor would.
    positive = values[values > 0]
    return float(np.median(positive)) if positive.size else math.nan


def _shades(low: float, high: float) -> list[Option]:
    """Divides the range into shades of equal width on a logarithmic scale, the darkest first."""
    edges = np.geomspace(low, high, _SHADES + 1) if high > low else [low] * (_SHADES + 1)
    shades: list[Option] = [
        {"gte": float(edges[at]), "lt": float(edges[at + 1]), "color": f"$heat-{at}"} for at in range(_SHADES)
    ]
    # Rounding must leave no value outside.
    shades[0].pop("gte")
    shades[-1].pop("lt")
    return shades


def _range(values: FloatArray) -> tuple[str, ...]:
    finite = values[~np.isnan(values)]
    if not finite.size:
        return Message("not measured"), "", ""
    return f"{np.median(finite):.2g}", f"{finite.min():.2g}", f"{finite.max():.2g}"
