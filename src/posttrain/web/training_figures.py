"""A training's charts, tables and numbers, as the page shows them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from posttrain.web.charts import Mark, Style, curve, stacked_bars, strips
from posttrain.web.charts.thin import Numbers, window_of
from posttrain.web.page import Table, Tile
from posttrain.web.training_data import Training
from posttrain.web.widths import NARROW, at_both_widths
from posttrain.web.wording import action_text, bytes_text, duration_text, kind_text, number_text

_PAGE = 600_000
"""Bytes that the curves of all trainings on a page may take together, about."""
_LINES = 14
"""Rows of a table of steps."""
_DECISIONS = 200
"""Rows of the table of decisions; what is more is counted."""


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


_MEASURES: tuple[tuple[str, str, Style], ...] = (
    ("loss", "loss", Style(number_text, zero=False)),
    ("grad_norm", "gradient norm", Style(number_text)),
    ("lr", "learning rate", Style(number_text, mean=False)),
    ("update_ratio", "update to weight ratio", Style(number_text)),
    ("tokens_per_second", "tokens a second", Style(number_text)),
    ("mfu", "model FLOP utilisation", Style(_percent)),
    ("memory_bytes", "memory", Style(bytes_text, mean=False)),
    ("data_wait", "time spent waiting for data", Style(_percent)),
    ("loss_scale", "loss scale", Style(number_text, mean=False)),
)
"""By the metrics file's name: the words for it, and how it is drawn."""


@dataclass(frozen=True)
class Shown:
    """A training as markup and words.

    Args:
        loss, groups, time: a chart for the desk and one for the phone; empty where nothing was measured.
        small: the other measures, each at one width.
        window: how many steps the broad lines are means of; 1 where there are none.
        decisions, numbers, norms: tables.
    """

    training: Training
    loss: Markup
    small: tuple[Markup, ...]
    groups: Markup
    time: Markup
    headline: tuple[Tile, ...]
    window: int
    decisions: Table
    numbers: Table
    norms: Table


def shown(training: Training, among: int = 1) -> Shown:
    """Everything about a training; its curves are the coarser, the more trainings the page shows."""
    buckets = _buckets(training, among)
    told = enumerate(training.decisions, 1)
    marks = [Mark(one.step, number, f"{one.what}: {action_text(one.action)}") for number, one in told]

    def draw(name: str, values: Numbers, style: Style, width: int) -> str:
        return curve(training.steps, values, name, style, marks=marks, width=width, buckets=buckets)

    (_, name, style), *others = _MEASURES
    small = [draw(title, training.values[key], how, NARROW) for key, title, how in others]
    small += [draw(key, values, Style(number_text, zero=False), NARROW) for key, values in training.objective.items()]
    return Shown(
        training=training,
        loss=at_both_widths(draw, name, training.values["loss"], style),
        small=tuple(Markup(chart) for chart in small if chart),
        groups=at_both_widths(strips, training.steps, training.groups, "gradient norm by layer"),
        time=at_both_widths(_time, training),
        headline=tuple(_headline(training)),
        window=window_of(int((~np.isnan(training.values["loss"])).sum())),
        decisions=_decisions(training),
        numbers=_numbers(training),
        norms=_norms(training),
    )


def _buckets(training: Training, among: int) -> int:
    """About three points a stretch and curve, of twelve bytes; the loss is drawn twice."""
    curves = len(_MEASURES) + 1 + len(training.objective)
    return int(np.clip(_PAGE / (among * curves * 36), 16, 320))


def _time(training: Training, width: int) -> str:
    rows = [("", training.phases)] if training.phases else []
    return stacked_bars(rows, list(training.phases), "where the time of all steps went", width=width)


def _headline(training: Training) -> list[Tile]:
    values = training.values
    tokens, seconds = (float(np.nansum(values[key])) for key in ("tokens", "seconds"))
    found = [(number_text(_last(values["loss"])), "loss", f"at first {number_text(_first(values['loss']))}")]
    found.append((f"{len(training.steps):,}", "steps", f"{tokens:,.0f} tokens" if tokens else ""))
    if seconds and not np.isnan(values["tokens_per_second"]).all():
        found.append((duration_text(seconds), "time", "all steps together"))
        usual = float(np.nanmedian(values["tokens_per_second"]))  # the first step may have compiled for a minute
        found.append((number_text(usual), "tokens a second", _usual_mfu(values["mfu"])))
    if not np.isnan(values["memory_bytes"]).all():
        found.append((bytes_text(float(np.nanmax(values["memory_bytes"]))), "memory", "at most"))
    count = len(training.decisions)
    found.append((f"{count}", "decisions" if count != 1 else "decision", "of the watch"))
    return found


def _usual_mfu(values: Numbers) -> str:
    return "" if np.isnan(values).all() else f"{_percent(float(np.nanmedian(values)))} of the peak"


def _first(values: Numbers) -> float:
    known = values[~np.isnan(values)]
    return float(known[0]) if known.size else float("nan")


def _last(values: Numbers) -> float:
    """The mean over the last steps, as many as the curve's mean takes."""
    known = values[~np.isnan(values)]
    return float(known[-window_of(len(known)) :].mean()) if known.size else float("nan")


def _decisions(training: Training) -> Table:
    rows: list[tuple[str, ...]] = [
        (str(number), f"{one.step:,}", kind_text(one.kind), one.what, _done(one.action, one.why))
        for number, one in enumerate(training.decisions[:_DECISIONS], 1)
    ]
    if more := len(training.decisions) - len(rows):
        rows.append(("…", "", f"{more:,} more", "", "see metrics.jsonl"))
    return ("mark", "step", "what", "seen", "done about it"), rows


def _done(action: str, why: str) -> str:
    return f"{action_text(action)} ({why})" if why else action_text(action)


def _numbers(training: Training) -> Table:
    """Some steps, evenly spaced, the first and the last among them."""
    columns: list[tuple[str, Numbers, Callable[[float], str]]] = [
        (title, training.values[key], style.show)
        for key, title, style in _MEASURES
        if not np.isnan(training.values[key]).all()
    ]
    columns += [(name, values, number_text) for name, values in training.objective.items()]
    count = len(training.steps)
    places = sorted({round(at * (count - 1) / (_LINES - 1)) for at in range(_LINES)})
    rows = [
        (f"{int(training.steps[at]):,}", *(_or_none(values[at], show) for _, values, show in columns)) for at in places
    ]
    return ("step", *(name for name, _, _ in columns)), rows


def _norms(training: Training) -> Table:
    rows = []
    for name, values in training.groups.items():
        known = values[~np.isnan(values)]
        if known.size:
            told: Sequence[float] = (known[0], np.median(known), known[-1], known.max())
            rows.append((name, *(number_text(float(one)) for one in told)))
    return ("layers", "first", "median", "last", "largest"), rows


def _or_none(value: float, show: Callable[[float], str]) -> str:
    return "–" if np.isnan(value) else show(float(value))
