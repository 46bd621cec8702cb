"""Builds the charts, tables and headline numbers of a training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.report.charts.bars import stacked_bars
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.curve import Annotation, CurveStyle, FloatArray, curve, smoothing_window
from posttrain.report.charts.heat_map import strips
from posttrain.report.formatting import action_text, bytes_text, duration_text, kind_text, number_text
from posttrain.web.page import Table, Tile
from posttrain.web.training_reader import TrainingCurves

_CURVE_BYTES = 300_000
"""Approximate budget in bytes for the curves of all trainings on a page."""
_STRIP_CELLS = 8000
"""Cells of the heat maps of all trainings on a page."""
_TABLE_STEPS = 14
"""Rows of a table of steps."""
_MAX_DECISIONS = 200
"""Rows of the table of decisions; the rest is only counted."""


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


MEASURES: tuple[tuple[str, str, CurveStyle], ...] = (
    ("loss", "loss", CurveStyle(number_text, zero=False)),
    ("grad_norm", "gradient norm", CurveStyle(number_text)),
    ("lr", "learning rate", CurveStyle(number_text, mean=False)),
    ("update_ratio", "update to weight ratio", CurveStyle(number_text)),
    ("tokens_per_second", "tokens a second", CurveStyle(number_text)),
    ("mfu", "model FLOP utilisation", CurveStyle(_percent, unit=(100, "%"))),
    ("memory_bytes", "memory", CurveStyle(bytes_text, mean=False, unit=(1e-6, " MB"))),
    ("data_wait", "time spent waiting for data", CurveStyle(_percent, unit=(100, "%"))),
    ("loss_scale", "loss scale", CurveStyle(number_text, mean=False)),
)
"""Name in the metrics file, title on the page, and style of each curve."""


@dataclass(frozen=True)
class TrainingView:
    """A training as charts, tables and headline numbers.

    Args:
        loss, groups, time: charts; None where nothing was measured.
        small: the other measures, for a grid.
        window: how many steps the broad lines are means of; 1 where there are none.
        decisions, numbers, norms: tables.
    """

    training: TrainingCurves
    loss: Chart | None
    small: tuple[Chart, ...]
    groups: Chart | None
    time: Chart | None
    headline: tuple[Tile, ...]
    window: int
    decisions: Table
    numbers: Table
    norms: Table


def training_view(training: TrainingCurves, among: float = 1) -> TrainingView:
    """Builds the view of a training; the more trainings a page shows, the coarser the curves."""
    buckets = _bucket_count(training, among)
    decisions = enumerate(training.decisions, 1)
    marks = [
        Annotation(decision.step, number, f"{decision.what}: {action_text(decision.action)}")
        for number, decision in decisions
    ]

    def draw(name: str, values: FloatArray, style: CurveStyle, small: bool = True) -> Chart | None:
        return curve(training.steps, values, name, style, marks=marks, buckets=buckets, small=small)

    (_, name, style), *others = MEASURES
    small = [draw(title, training.values[key], how) for key, title, how in others]
    small += [draw(key, values, CurveStyle(number_text, zero=False)) for key, values in training.objective.items()]
    return TrainingView(
        training=training,
        loss=draw(name, training.values["loss"], style, small=False),
        small=tuple(chart for chart in small if chart),
        groups=strips(training.steps, training.groups, "gradient norm by layer", int(_STRIP_CELLS / among)),
        time=_time(training),
        headline=tuple(_headline(training)),
        window=smoothing_window(int((~np.isnan(training.values["loss"])).sum())),
        decisions=_decisions(training),
        numbers=_numbers(training),
        norms=_norms(training),
    )


def _bucket_count(training: TrainingCurves, among: float) -> int:
    """Returns the number of stretches a curve is downsampled to, to stay within the page's budget."""
    # A stretch has two points of about 15 bytes, and the mean another.
    curves = len(MEASURES) + 1 + len(training.objective)
    return int(np.clip(_CURVE_BYTES / (among * curves * 45), 16, 320))


def _time(training: TrainingCurves) -> Chart | None:
    rows = [("", training.phases)] if training.phases else []
    return stacked_bars(rows, list(training.phases), "where the time of all steps went")


def _headline(training: TrainingCurves) -> list[Tile]:
    values = training.values
    tokens, seconds = (float(np.nansum(values[key])) for key in ("tokens", "seconds"))
    tiles = [(number_text(_last(values["loss"])), "loss", f"at first {number_text(_first(values['loss']))}")]
    tiles.append((f"{len(training.steps):,}", "steps", f"{tokens:,.0f} tokens" if tokens else ""))
    if seconds and not np.isnan(values["tokens_per_second"]).all():
        tiles.append((duration_text(seconds), "time", "all steps together"))
        # The median, since the first step may have compiled for a minute.
        usual = float(np.nanmedian(values["tokens_per_second"]))
        tiles.append((number_text(usual), "tokens a second", _median_mfu(values["mfu"])))
    if not np.isnan(values["memory_bytes"]).all():
        tiles.append((bytes_text(float(np.nanmax(values["memory_bytes"]))), "memory", "at most"))
    count = len(training.decisions)
    tiles.append((f"{count}", "decisions" if count != 1 else "decision", "by the monitor"))
    return tiles


def _median_mfu(values: FloatArray) -> str:
    return "" if np.isnan(values).all() else f"{_percent(float(np.nanmedian(values)))} of the peak"


def _first(values: FloatArray) -> float:
    finite = values[~np.isnan(values)]
    return float(finite[0]) if finite.size else float("nan")


def _last(values: FloatArray) -> float:
    """Averages the last steps, as many as the curve's moving average."""
    # One step's loss is noise, and the number must agree with the line drawn beside it.
    known = values[~np.isnan(values)]
    return float(known[-smoothing_window(len(known)) :].mean()) if known.size else float("nan")


def _decisions(training: TrainingCurves) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            str(number),
            f"{decision.step:,}",
            kind_text(decision.kind),
            decision.what,
            _action_words(decision.action, decision.why),
        )
        for number, decision in enumerate(training.decisions[:_MAX_DECISIONS], 1)
    ]
    if more := len(training.decisions) - len(rows):
        rows.append(("…", "", f"{more:,} more", "", "see metrics.jsonl"))
    return ("mark", "step", "what", "seen", "done about it"), rows


def _action_words(action: str, why: str) -> str:
    return f"{action_text(action)} ({why})" if why else action_text(action)


def _numbers(training: TrainingCurves) -> Table:
    """Builds a table of evenly spaced steps, including the first and the last."""
    columns: list[tuple[str, FloatArray, Callable[[float], str]]] = [
        (title, training.values[key], style.show)
        for key, title, style in MEASURES
        if not np.isnan(training.values[key]).all()
    ]
    columns += [(name, values, number_text) for name, values in training.objective.items()]
    count = len(training.steps)
    places = sorted({round(at * (count - 1) / (_TABLE_STEPS - 1)) for at in range(_TABLE_STEPS)})
    rows = [
        (f"{int(training.steps[at]):,}", *(_value_or_dash(values[at], show) for _, values, show in columns))
        for at in places
    ]
    return ("step", *(name for name, _, _ in columns)), rows


def _norms(training: TrainingCurves) -> Table:
    rows = []
    for name, values in training.groups.items():
        finite = values[~np.isnan(values)]
        if finite.size:
            numbers: Sequence[float] = (finite[0], np.median(finite), finite[-1], finite.max())
            rows.append((name, *(number_text(float(number)) for number in numbers)))
    return ("layers", "first", "median", "last", "largest"), rows


def _value_or_dash(value: float, show: Callable[[float], str]) -> str:
    return "–" if np.isnan(value) else show(float(value))
