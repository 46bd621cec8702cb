"""Scatter plots of points in layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from posttrain.web.charts.svg import Legend, element, figure, tooltip

Points = npt.NDArray[np.floating]

_EDGE = 12.0


@dataclass(frozen=True)
class ScatterLayer:
    """Points that look alike.

    Args:
        name: legend entry.
        points: float [N, 2].
        class_: CSS class that sets their colour.
        shape: a name in `SHAPES`.
        labels: tooltips of the first points; later ones have none.
    """

    name: str
    points: Points
    class_: str
    shape: str
    labels: Sequence[str] = ()


def _dot(x: float, y: float) -> str:
    # A line of no length with round caps: a third of the bytes of a circle, and a map has thousands.
    return f"M{x:.0f} {y:.0f}h0"


def _cross(x: float, y: float) -> str:
    return f"M{x - 3:.0f} {y - 3:.0f}l6 6m0-6l-6 6"


def _circle(x: float, y: float) -> str:
    return f"M{x - 5:.0f} {y:.0f}a5 5 0 1 0 10 0a5 5 0 1 0-10 0z"


def _diamond(x: float, y: float) -> str:
    return f"M{x:.0f} {y - 6:.0f}l6 6l-6 6l-6-6z"


def _square(x: float, y: float) -> str:
    return f"M{x - 4.5:.1f} {y - 4.5:.1f}h9v9h-9z"


def _triangle(x: float, y: float) -> str:
    return f"M{x:.0f} {y - 6:.0f}l6 10.5h-12z"


SHAPES: dict[str, Callable[[float, float], str]] = {
    "dot": _dot,
    "cross": _cross,
    "circle": _circle,
    "diamond": _diamond,
    "square": _square,
    "triangle": _triangle,
}
"""Draws a shape's path around a point, by the shape's name."""


def scatter(layers: Sequence[ScatterLayer], title: str, *, height: int = 440, width: int = 760) -> str:
    """Draws all points on one scale, equal in both directions, without axes; returns "" without points.

    Args:
        layers: drawn one over the other, the first at the bottom.
        height: of the plane in pixels, at most as great as the width.
    """
    filled = [layer for layer in layers if len(layer.points)]
    if not filled:
        return ""
    every = np.concatenate([layer.points for layer in filled]).astype(np.float64)
    low, high = every.min(axis=0), every.max(axis=0)
    size = np.array([width, min(height, width)], np.float64)
    # One scale for both directions: distances are the only thing that the map means.
    scale = float(((size - 2 * _EDGE) / np.maximum(high - low, 1e-9)).min()) if (high > low).any() else 0.0
    legend = Legend([(layer.name, partial(_path, layer, "")) for layer in filled], width)
    marks = []
    for layer in filled:
        positions = (size / 2 + (layer.points - (low + high) / 2) * scale * (1, -1)).tolist()
        marks += [_path(layer, label, *position) for label, position in zip(layer.labels, positions, strict=False)]
        # All points without a tooltip share one path, which makes a page of thousands of points small.
        if rest := positions[len(layer.labels) :]:
            path = "".join(SHAPES[layer.shape](x, y) for x, y in rest)
            marks.append(element("path", d=path, class_=layer.class_))
    frame = element("rect", x=0.5, y=0.5, width=width - 1, height=size[1] - 1, rx=8, class_="frame")
    top = float(size[1]) + 20
    return figure(width, top + legend.height - 8, title, frame, *marks, legend.at(2, top))


def _path(layer: ScatterLayer, label: str, x: float, y: float) -> str:
    titles = [tooltip(label)] if label else []
    return element("path", *titles, d=SHAPES[layer.shape](x, y), class_=layer.class_)
