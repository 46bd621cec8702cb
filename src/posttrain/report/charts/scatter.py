"""Scatter plots of points in layers, on one scale for both directions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posttrain.report.charts.chart import Chart, Option
from posttrain.store.message import Message

Points = npt.NDArray[np.floating]

_GRID = 1000
"""Positions are whole numbers up to this, which is finer than a screen and short in a file."""

SYMBOLS: dict[str, Option] = {
    "dot": {"symbol": "circle", "symbolSize": 4.5},
    "cross": {"symbol": "path://M0 1L1 0L5 4L9 0L10 1L6 5L10 9L9 10L5 6L1 10L0 9L4 5Z", "symbolSize": 6},
    "circle": {"symbol": "circle", "symbolSize": 10},
    "diamond": {"symbol": "diamond", "symbolSize": 12},
    "square": {"symbol": "rect", "symbolSize": 9},
    "triangle": {"symbol": "triangle", "symbolSize": 11},
}
"""Shapes of points, by their names."""


@dataclass(frozen=True)
class ScatterLayer:
    """Points that look alike.

    Args:
        name: legend entry.
        points: float [N, 2].
        colour: of all of them.
        shape: a name in `SYMBOLS`.
        labels: tooltips of the first points; later ones have none.
    """

    name: str
    points: Points
    colour: str
    shape: str
    labels: Sequence[str] = ()


def scatter(layers: Sequence[ScatterLayer], title: str, *, height: int = 440) -> Chart | None:
    """Draws all points on one scale, equal in both directions, without axes; returns None without points.

    Args:
        layers: drawn one over the other, the first at the bottom.
        height: of the plane in pixels.
    """
    filled = [layer for layer in layers if len(layer.points)]
    if not filled:
        return None
    every = np.concatenate([layer.points for layer in filled]).astype(np.float64)
    low, high = every.min(axis=0), every.max(axis=0)
    # One scale for both directions: distances are the only thing that the map means.
    scale = _GRID / float(max((high - low).max(), 1e-9))
    ends = np.rint((high - low) * scale).astype(int).tolist()
    series = []
    for layer in filled:
        positions = np.rint((layer.points - low) * scale).astype(int).tolist()
        labelled = [{"value": position, "tip": label} for position, label in zip(positions, layer.labels, strict=False)]
        # Points without a tooltip are pairs of numbers, which makes a page of thousands of points small.
        data = [*labelled, *positions[len(layer.labels) :]]
        faint = layer.shape in ("dot", "cross")
        style = {"color": layer.colour, "opacity": 0.55 if faint else 1.0}
        style |= {} if faint else {"borderColor": "$paper", "borderWidth": 1.2}
        series.append(
            {"type": "scatter", "name": layer.name, "data": data, "itemStyle": style, "silent": not layer.labels}
            | SYMBOLS[layer.shape]
        )
    axes = [{"type": "value", "show": False, "min": 0, "max": end or 1} for end in ends]
    option: Option = {
        "grid": {"top": 10, "left": 10, "right": 10, "bottom": 10, "show": True, "borderColor": "$grid"},
        "xAxis": axes[0],
        "yAxis": axes[1],
        "tooltip": {"trigger": "item"},
        "dataZoom": [{"type": "inside", "xAxisIndex": 0}, {"type": "inside", "yAxisIndex": 0}],
        "legend": {"data": [layer.name for layer in filled]},
        "series": series,
    }
    table = [(layer.name, f"{len(layer.points):,}") for layer in filled]
    return Chart(title, option, height, ("", Message("points")), table, equal=True)
