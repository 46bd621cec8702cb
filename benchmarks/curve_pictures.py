"""Draws the learning curves of several strategies as one SVG picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from posttrain.web.charts.svg import element, figure, level_lines, standalone, text, ticks

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#a6a000", "#8c564b")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 420, 56, 250, 24, 48


def draw(
    path: Path,
    title: str,
    counts: Sequence[int],
    curves: Mapping[str, np.ndarray],
    peers: Sequence[str],
    target: float,
) -> None:
    """Draw the curves into an SVG file.

    Args:
        path: the SVG file.
        title: the description for screen readers.
        counts: number of labels at each point.
        curves: float64 [seeds, counts] by strategy, drawn as their mean with a band of one standard error.
        peers: the strategies that are not ours; their lines are dashed.
        target: the accuracy at which a horizontal line is drawn.
    """
    means = {name: values.mean(axis=0) for name, values in curves.items()}
    errors = {name: values.std(axis=0, ddof=1) / len(values) ** 0.5 for name, values in curves.items()}
    all_means = np.concatenate(list(means.values()))
    levels = ticks(float(all_means.min()), float(all_means.max()), 6)

    def x(count: float) -> float:
        return float(np.interp(count, [counts[0], counts[-1]], [_LEFT, _WIDTH - _RIGHT]))

    def y(value: float) -> float:
        return float(np.interp(value, [levels[0], levels[-1]], [_HEIGHT - _BOTTOM, _TOP]))

    parts = level_lines(levels, _LEFT, _WIDTH - _RIGHT, y, lambda value: f"{value:.0%}")
    for count in counts[:: max(1, len(counts) // 7)]:
        parts.append(text(f"{count}", x(count), _HEIGHT - _BOTTOM + 18, anchor="middle"))
    parts.append(text("labels", (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, anchor="middle"))
    target_style = {"stroke": "#888", "stroke_dasharray": "2 3"}
    parts.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y(target), y2=y(target), **target_style))
    for rank, (name, mean) in enumerate(sorted(means.items(), key=lambda item: -item[1].mean())):
        colour = "#666" if name == "random" else _COLOURS[rank % len(_COLOURS)]
        style = {"stroke": colour, "fill": "none", "stroke_width": 2} | (
            {"stroke_dasharray": "6 4"} if name in peers else {}
        )
        upper = [f"{x(count):.1f},{y(value):.1f}" for count, value in zip(counts, mean + errors[name], strict=True)]
        lower = [f"{x(count):.1f},{y(value):.1f}" for count, value in zip(counts, mean - errors[name], strict=True)]
        parts.append(element("polygon", points=" ".join(upper + lower[::-1]), fill=colour, fill_opacity=0.12))
        line = " ".join(f"{x(count):.1f},{y(value):.1f}" for count, value in zip(counts, mean, strict=True))
        parts.append(element("polyline", points=line, **style))
        legend_y, legend_x = _TOP + 8 + 22 * rank, _WIDTH - _RIGHT + 16
        parts.append(element("line", x1=legend_x, x2=legend_x + 26, y1=legend_y, y2=legend_y, **style))
        parts.append(text(name, legend_x + 32, legend_y + 4))
    path.write_text(standalone(figure(_WIDTH, _HEIGHT, title, *parts)), encoding="utf-8")
