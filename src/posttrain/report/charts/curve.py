"""Line charts over the steps of a training: downsampled without losing a spike, smoothed, and annotated."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from posttrain.report.charts.chart import Chart, Formatter, Option, series_colour, ticks, value_axis
from posttrain.store.message import Message

FloatArray = NDArray[np.float64]

_STEP = Message("step")
_PLACES = {
    "first": Message("first"),
    "lowest": Message("lowest"),
    "highest": Message("highest"),
    "last": Message("last"),
}


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
        unit: factor and suffix of a value in a tooltip.
    """

    show: Formatter
    zero: bool = True
    mean: bool = True
    unit: tuple[float, str] = (1.0, "")


def curve(
    steps: FloatArray,
    values: FloatArray,
    name: str,
    style: CurveStyle,
    *,
    marks: Sequence[Annotation] = (),
    buckets: int = 320,
    small: bool = False,
) -> Chart | None:
    """Draws one measure of a training; returns None if nothing was measured.

    Values far above all others are cut off at the top and counted, or a single spike would flatten all else.

    Args:
        steps: float64 [N], rising.
        values: float64 [N]; NaN where nothing was measured.
        name: name of the measure.
        buckets: stretches that a long training is thinned to, each with its lowest and highest.
        small: for a grid of charts.
    """
    measured = ~np.isnan(values)
    if not measured.any():
        return None
    low, high = _axis_limits(values[measured], style.zero)
    levels = ticks(low, high, 4)
    high = levels[-1]
    window = smoothing_window(int(measured.sum())) if style.mean else 1
    series = [
        _line(Message("each step") if window > 1 else name, *downsample(steps, values, buckets), broad=window == 1)
    ]
    if window > 1:
        # Clipped at the axis, because a spike would lift the mean of all steps around it.
        mean = smooth(np.minimum(values, high), window)
        # Too few values at the ends: the line would follow single steps.
        mean[: window // 4] = mean[len(mean) - window // 4 :] = np.nan
        series.append(
            _line(Message("mean of {window}", window=window), *downsample(steps, mean, buckets // 2), broad=True)
        )
    first, last = float(steps[0]), float(steps[-1])
    lines = _event_lines([mark for mark in marks if first <= mark.step <= last], last - first)
    if lines["data"]:
        series[-1]["markLine"] = lines
    above = int((values[measured] > high).sum())
    # An axis of one step has no width: half a step at both sides gives it one.
    margin = 0.5 if first == last else 0.0
    step_axis = {"type": "value", "min": first - margin, "max": last + margin, "minInterval": 1, "name": _STEP}
    option: Option = {
        "grid": {"top": 28 if lines["data"] else 10, "bottom": 0},
        "xAxis": {**step_axis, "splitLine": {"show": False}, "nameLocation": "middle", "splitNumber": 4},
        "yAxis": value_axis(levels, style.show),
        "tooltip": {"trigger": "axis"},
        "dataZoom": _zoom(len(steps), small),
        "series": series,
    }
    return Chart(
        _aria_label(steps[measured], values[measured], name, style.show),
        option,
        190 if small else 280,
        ("", _STEP, name),
        _extremes(steps[measured], values[measured], style.show),
        heading=name,
        note=Message("{count} above", count=f"{above:,}") if above else "",
        unit=style.unit,
    )


def compared_curves(
    runs: Sequence[tuple[str, FloatArray, FloatArray]],
    name: str,
    style: CurveStyle,
    *,
    axis: str = Message("step"),
    buckets: int = 160,
) -> Chart | None:
    """Draws one measure of several trainings over each other; returns None if none has it.

    Args:
        runs: name, steps float64 [N] and values float64 [N] of each; NaN where nothing was measured.
        name: name of the measure.
        axis: name of the steps.
        buckets: stretches that a long training is thinned to.
    """
    measured = [(run, steps, values) for run, steps, values in runs if not np.isnan(values).all()]
    if not measured:
        return None
    together = np.concatenate([values[~np.isnan(values)] for _, _, values in measured])
    levels = ticks(*_axis_limits(together, style.zero), 4)
    series = []
    for number, (run, steps, values) in enumerate(measured):
        # A moving average where there are many steps: several noisy curves could not be told apart.
        window = smoothing_window(int((~np.isnan(values)).sum())) if style.mean else 1
        line = _line(run, *downsample(steps, smooth(values, window), buckets), broad=True)
        colour = series_colour(number)
        series.append(line | {"lineStyle": {"color": colour, "width": 2}, "itemStyle": {"color": colour}})
    last = max(float(steps[-1]) for _, steps, _ in measured)
    step_axis = {"type": "value", "min": 0, "max": last or 1.0, "minInterval": 1, "name": axis}
    option: Option = {
        "grid": {"top": 10, "bottom": 0},
        "xAxis": {**step_axis, "splitLine": {"show": False}, "nameLocation": "middle", "splitNumber": 4},
        "yAxis": value_axis(levels, style.show),
        "tooltip": {"trigger": "axis"},
        "legend": {"data": [run for run, _, _ in measured]},
        "dataZoom": _zoom(max(len(steps) for _, steps, _ in measured), small=True),
        "series": series,
    }
    rows = []
    for run, _, values in measured:
        finite = values[~np.isnan(values)]
        rows.append((run, *(style.show(float(value)) for value in (finite[0], finite.min(), finite.max(), finite[-1]))))
    drawn = Message.joined(", ", [run for run, _, _ in measured])
    title = Message("{name} by {axis}: {runs}", name=name, axis=axis, runs=drawn)
    columns = ("", *(_PLACES[place] for place in ("first", "lowest", "highest", "last")))
    return Chart(title, option, 240, columns, rows, heading=name, unit=style.unit)


def _zoom(count: int, small: bool) -> list[Option]:
    """Builds the zoom along the steps; a slider too where there are many and room for it."""
    inside = {"type": "inside", "filterMode": "none"}
    return [inside, {"type": "slider", "filterMode": "none"}] if count > 100 and not small else [inside]


def _line(name: str, steps: FloatArray, values: FloatArray, broad: bool) -> Option:
    single = int((~np.isnan(values)).sum()) == 1
    points = [(int(step) if step == int(step) else step, value) for step, value in zip(steps, values, strict=True)]
    style = {"color": "$blue", "width": 2.2 if broad else 1, "opacity": 1 if broad else 0.4}
    # A line through one point shows nothing.
    marks = {"showSymbol": single, "symbol": "circle", "symbolSize": 7}
    return {"type": "line", "name": name, "data": points, "lineStyle": style, "itemStyle": {"color": "$blue"}, **marks}


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


def _event_lines(marks: Sequence[Annotation], span: float) -> Option:
    """Builds a line for each event, merges lines that would touch, and numbers them where there is room."""
    groups: list[list[Annotation]] = []
    for mark in sorted(marks, key=lambda mark: (mark.step, mark.number)):
        # Lines closer than a hundredth of the axis could not be told apart by a pointer.
        if groups and mark.step - groups[-1][0].step < 0.01 * span:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    data, free = [], -np.inf
    for group in groups:
        step = group[0].step
        labels = [Message("{name}: {label}", name=mark.number, label=mark.label) for mark in group[:3]]
        labels += [Message("and {count} more", count=len(group) - 3)] if len(group) > 3 else []
        # Numbers closer than this would overlap on a phone; the line and its tooltip stay.
        numbered = step >= free
        free = step + 0.07 * span if numbered else free
        data.append(
            {
                "xAxis": step,
                "tip": Message.joined("; ", labels),
                "label": {"show": numbered, "formatter": str(group[0].number)},
            }
        )
    label = {"color": "$paper", "backgroundColor": "$red", "borderRadius": 8, "padding": [2, 5], "fontSize": 11}
    line = {"color": "$red", "type": [3, 3], "width": 1.5}
    return {"symbol": "none", "lineStyle": line, "label": label, "data": data}


def _extremes(steps: FloatArray, values: FloatArray, show: Formatter) -> list[tuple[str, str, str]]:
    places = {"first": 0, "lowest": int(values.argmin()), "highest": int(values.argmax()), "last": len(values) - 1}
    return [(_PLACES[name], f"{int(steps[at]):,}", show(float(values[at]))) for name, at in places.items()]


def _aria_label(steps: FloatArray, values: FloatArray, name: str, show: Formatter) -> Message:
    """Describes the curve for screen readers."""
    places = {"first": 0, "last": len(values) - 1, "lowest": int(values.argmin()), "highest": int(values.argmax())}
    shown = {place: show(float(values[at])) for place, at in places.items()}
    shown |= {f"{place}_step": f"{int(steps[at]):,}" for place, at in places.items()}
    return Message(
        "{name} by step: {first} at step {first_step}, {last} at step {last_step}; lowest {lowest} at step "
        "{lowest_step}, highest {highest} at step {highest_step}",
        name=name,
        **shown,
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
