"""Line charts over the steps of a training: downsampled without losing a spike, smoothed, and annotated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from posttrain.web.charts.svg import Formatter, Scale, element, figure, level_lines, text, ticks, tooltip, truncate

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Annotation:
    """An event at a step: its number in the table of events, and its label."""

    step: int
    number: int
    label: str


@dataclass(frozen=True)
class CurveStyle:
    """Controls how a curve is drawn.

    Args:
        show: formats a value.
        zero: whether the axis begins at zero.
        mean: also draw a moving average, for noisy steps.
    """

    show: Formatter
    zero: bool = True
    mean: bool = True


def curve(
    steps: FloatArray,
    values: FloatArray,
    name: str,
    style: CurveStyle,
    *,
    marks: Sequence[Annotation] = (),
    width: int = 760,
    buckets: int = 320,
) -> str:
    """Draws one measure of a training; returns "" if nothing was measured.

    Values far above all others are cut off at the top and counted, or a single spike would flatten all else.

    Args:
        steps: float64 [N], rising.
        values: float64 [N]; NaN where nothing was measured.
        name: name of the measure.
        buckets: stretches that a long training is thinned to, each with its lowest and highest.
    """
    measured = ~np.isnan(values)
    if not measured.any():
        return ""
    low, high = _axis_limits(values[measured], style.zero)
    levels = ticks(low, high, 4)
    low, high = levels[0], levels[-1]
    left, right, top = 56.0, width - 14.0, 40.0
    bottom = top + (190 if width >= 500 else 130)
    first, last = float(steps[0]), float(steps[-1])

    def x(step: float) -> float:
        return left + (right - left) * (0.5 if first == last else (step - first) / (last - first))

    def y(value: float) -> float:
        return bottom - (bottom - top) * (min(max(value, low), high) - low) / (high - low)

    window = smoothing_window(int(measured.sum())) if style.mean else 1
    lines = [_path(*downsample(steps, values, buckets), x, y, "step-line" if window > 1 else "mean-line")]
    if window > 1:
        # Clipped at the axis, because a spike would lift the mean of all steps around it.
        mean = smooth(np.minimum(values, high), window)
        # Too few values at the ends: the line would follow single steps.
        mean[: window // 4] = mean[len(mean) - window // 4 :] = np.nan
        lines.append(_path(*downsample(steps, mean, buckets // 2), x, y, "mean-line"))
    above = int((values[measured] > high).sum())
    cut = [text(f"{above:,} above", right, 14, "soft small", "end")] if above else []
    return figure(
        width,
        bottom + 30,
        _aria_label(steps[measured], values[measured], name, style.show),
        text(truncate(name, right - 70), 4, 14, "strong"),
        *cut,
        *level_lines(levels, left, right, y, style.show),
        *step_axis(first, last, x(first), right, bottom + 18),
        *lines,
        *_annotation_lines([mark for mark in marks if first <= mark.step <= last], x, top, bottom),
        *_hover_boxes(steps, values, style.show, x, top, bottom, max(4, buckets // 10)),
    )


def _axis_limits(values: FloatArray, zero: bool) -> tuple[float, float]:
    """Returns the axis limits: all values, or fewer if a few outliers would flatten the rest."""
    lowest, high, highest = (float(quantile) for quantile in np.quantile(values, (0, 0.98, 1)))
    base = min(0.0, lowest) if zero else lowest
    # A single spike would flatten all other values: the axis ends above the 98th percentile, and the chart counts the
    # rest.
    if highest - base > 3 * (high - base) > 0:
        highest = base + 1.2 * (high - base)
    # A constant series needs an axis of some height, or its scale would divide by zero.
    if base == highest:
        base, highest = (min(0.0, base), max(0.0, highest)) if base else (0.0, 1.0)
    return base, highest


def _path(steps: FloatArray, values: FloatArray, x: Scale, y: Scale, kind: str) -> str:
    pen, path = "M", []
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        if math.isnan(value):
            pen = "M"
            continue
        path.append(f"{pen}{x(step):.1f} {y(value):.1f}")
        pen = "L"
    # With round caps a line of no length shows as a dot.
    if len(path) == 1:
        path.append("h0")
    return element("path", d="".join(path), class_=kind)


def step_axis(first: float, last: float, left: float, right: float, y: float) -> list[str]:
    """Draws round step numbers from ``left`` to ``right``, their baseline at ``y``."""
    room = (right - left) / ((last - first) or 1)
    whole = [step for step in ticks(first, last, 4) if first <= step <= last and step == int(step)] or [first]
    labels = [(left + (step - first) * room, f"{int(step):,}") for step in whole]
    numbers = [text(label, x, y, "soft", "middle") for x, label in labels if x < right - 46]
    return [*numbers, text("step", right, y, "soft", "end")]


def _annotation_lines(marks: Sequence[Annotation], x: Scale, top: float, bottom: float) -> list[str]:
    """Draws a line for each event, merges lines that would touch, and numbers them where there is room."""
    groups: list[list[Annotation]] = []
    for mark in sorted(marks, key=lambda mark: (mark.step, mark.number)):
        # Marks closer than five pixels could not be told apart by a pointer.
        if groups and x(mark.step) - x(groups[-1][0].step) < 5:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    shapes, free = [], -math.inf
    for group in groups:
        at = x(group[0].step)
        labels = [f"{mark.number}: {truncate(mark.label, 120, 1)}" for mark in group[:3]]
        labels += [f"and {len(group) - 3} more"] if len(group) > 3 else []
        content = [tooltip("; ".join(labels)), element("line", x1=at, x2=at, y1=top - 6, y2=bottom, class_="mark-line")]
        # Numbers closer than 18 pixels would overlap; the line and its tooltip stay.
        if at >= free:
            free = at + 18
            content.append(element("circle", cx=at, cy=top - 13, r=8.5, class_="mark"))
            content.append(text(str(group[0].number), at, top - 9, "mark-number", "middle"))
        shapes.append(element("g", *content))
    return shapes


def _hover_boxes(
    steps: FloatArray, values: FloatArray, show: Formatter, x: Scale, top: float, bottom: float, count: int
) -> list[str]:
    """Draws invisible boxes over stretches of the curve whose tooltips summarise them."""
    marks = []
    # One box a point would double the size of the page; a stretch of steps has one tooltip.
    for stretch in np.array_split(np.arange(len(values)), min(count, len(values))):
        part = values[stretch]
        if np.isnan(part).all():
            continue
        start, end = steps[stretch[0]], steps[stretch[-1]]
        left, right = x(float(start)), x(float(steps[min(int(stretch[-1]) + 1, len(steps) - 1)]))
        label = f"step {int(start):,}: {show(float(part[0]))}"
        if len(stretch) > 1:
            low, mean, high = (show(float(value)) for value in (np.nanmin(part), np.nanmean(part), np.nanmax(part)))
            label = f"steps {int(start):,} to {int(end):,}: {mean} ({low} to {high})"
        box = {"x": left, "y": top, "width": max(right - left, 4.0), "height": bottom - top}
        marks.append(element("rect", tooltip(label), **box, class_="hover"))
    return marks


def _aria_label(steps: FloatArray, values: FloatArray, name: str, show: Formatter) -> str:
    """Describes the curve for screen readers."""
    lowest, highest = int(values.argmin()), int(values.argmax())
    return (
        f"{name} by step: {show(float(values[0]))} at step {int(steps[0]):,}, {show(float(values[-1]))} at step "
        f"{int(steps[-1]):,}; lowest {show(float(values[lowest]))} at step {int(steps[lowest]):,}, highest "
        f"{show(float(values[highest]))} at step {int(steps[highest]):,}"
    )


def downsample(steps: FloatArray, values: FloatArray, buckets: int) -> tuple[FloatArray, FloatArray]:
    """Keeps the lowest and the highest point of each of ``buckets`` stretches, in their order.

    Args:
        steps, values: float64 [N]; NaN where nothing was measured.
        buckets: stretches of steps, of the same length but for one.

    Returns:
        Both, [M] with M at most ``2 * buckets``; a stretch of nothing but NaN stays one NaN, so that a line breaks.
    """
    if len(values) <= 2 * buckets:
        return steps, values
    indices: list[int] = []
    # Extremes instead of means: a spike of one step in a million has to stay visible.
    for stretch in np.array_split(np.arange(len(values)), buckets):
        part = values[stretch]
        if np.isnan(part).all():
            indices.append(int(stretch[0]))
        else:
            indices += sorted({int(stretch[np.nanargmin(part)]), int(stretch[np.nanargmax(part)])})
    return steps[indices], values[indices]


def smooth(values: FloatArray, window: int) -> FloatArray:
    """Computes a centred moving average, with a smaller window at both ends; NaN is ignored and stays NaN."""
    measured = ~np.isnan(values)
    # Prefix sums make the average linear in the number of steps, whatever the window.
    total = np.concatenate([[0.0], np.cumsum(np.where(measured, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(measured)])
    at = np.arange(len(values))
    first, last = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    # Symmetric windows, so that a slope is not bent at the ends.
    reach = np.minimum(at - first, last - 1 - at)
    first, last = at - reach, at + reach + 1
    with np.errstate(invalid="ignore"):
        means = (total[last] - total[first]) / (count[last] - count[first])
    return np.where(measured, means, np.nan)


def smoothing_window(count: int) -> int:
    """Returns the moving average's window for ``count`` values; 1 if there are too few."""
    # Odd, so that the window is centred on its step.
    return 1 if count < 30 else max(5, count // 30) | 1
