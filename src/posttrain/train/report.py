"""The report of a training: its curves, and what the monitor detected."""

from collections.abc import Mapping, Sequence

import numpy as np

from posttrain.report.charts.bars import format_seconds, stacked_bars
from posttrain.report.charts.chart import Chart, truncate
from posttrain.report.charts.curve import Annotation, CurveStyle, FloatArray, compared_curves, curve, smoothing_window
from posttrain.report.charts.heat_map import strips
from posttrain.report.formatting import bytes_text, number_text
from posttrain.report.section import Block, Fold, Grid, Page, Pairs, Section, Table, Text, blocks
from posttrain.store.message import Message
from posttrain.train.curves import TrainingCurves, TrainingDecision

_CURVE_BYTES = 300_000
"""Approximate budget in bytes for the curves of all trainings on a page."""
_STRIP_CELLS = 8000
"""Cells of the heat maps of all trainings on a page."""
_MAX_DECISIONS = 200
"""Rows of the table of decisions; the rest is only counted."""
_TRAININGS = 20
"""Number of rounds' trainings that are drawn, the latest; earlier ones are only counted."""

_KINDS = {
    "nan": "NaN or infinity",
    "explosion": "exploding gradient",
    "divergence": "diverging loss",
    "plateau": "loss plateau",
    "dead_layers": "dead layers",
    "no_supervised": "no supervised token",
}
_ACTIONS = {
    "warn": "logged a warning",
    "skip": "skipped this batch",
    "rollback": "rolled back to the last good checkpoint and skipped this data",
    "lower_rate": "lowered the learning rate",
    "stop": "stopped the training",
}
_DECISIONS = Message("Problems that the monitor detected, and its actions.")
_NO_PROBLEM = Message("The monitor detected no problem.")
_LAYERS = Message(
    "The gradient norm of each layer over the steps: darker is larger. A strip that stays paler than the others learns "
    "next to nothing."
)
_TIME = Message("The time of all steps by phase. `posttrain train --profile` shows more detail.")
_SETTINGS = Message("The main settings; `config.yaml` has all of them.")


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


_COMPARED = ("loss", "grad_norm", "lr", "tokens_per_second")
_PLAIN = CurveStyle(number_text, zero=False)

MEASURES: tuple[tuple[str, str, CurveStyle], ...] = (
    ("loss", Message("loss"), CurveStyle(number_text, zero=False)),
    ("grad_norm", Message("gradient norm"), CurveStyle(number_text)),
    ("lr", Message("learning rate"), CurveStyle(number_text, mean=False)),
    ("update_ratio", Message("update to weight ratio"), CurveStyle(number_text)),
    ("tokens_per_second", Message("tokens per second"), CurveStyle(number_text)),
    ("mfu", Message("model FLOP utilisation"), CurveStyle(_percent, unit=(100, "%"))),
    ("memory_bytes", Message("memory"), CurveStyle(bytes_text, mean=False, unit=(1e-6, " MB"))),
    ("data_wait", Message("time spent waiting for data"), CurveStyle(_percent, unit=(100, "%"))),
    ("loss_scale", Message("loss scale"), CurveStyle(number_text, mean=False)),
)
"""Name in the metrics file, title on the page, and style of each curve."""


def training_page(training: TrainingCurves) -> Page:
    """Returns the page of one training."""
    settings = training.settings
    sentence = "{model} on {data}".format(**settings) if {"model", "data"} <= settings.keys() else ""
    return Page(training.name, "training", sentence, headline(training), training_sections(training))


def training_sections(training: TrainingCurves) -> list[Section]:
    """Returns the sections of a page on one training."""
    caption = Message("The measurements of each optimiser step. {lines}", lines=_lines_sentence(training))
    if training.decisions:
        text = "{caption} Numbered lines are the monitor's decisions, listed below."
        caption = Message(text, caption=caption)
    settings = [(Message(name), value) for name, value in training.settings.items()]
    sections = [
        Section.of(Message("Curves"), caption, _curves(training)),
        Section.of(Message("Decisions"), _DECISIONS, _decisions(training) or Text(_NO_PROBLEM, "empty")),
        Section.of(Message("Layers"), _LAYERS, layer_chart(training)),
        Section.of(Message("Time"), _TIME, time_chart(training)),
        Section.of(Message("Settings"), _SETTINGS, Pairs(settings)),
    ]
    return [section for section in sections if section.blocks]


def trainings_section(trainings: Mapping[int, TrainingCurves | None], detail: float = 1.0) -> Section:
    """Shows the training of each round, the latest ones drawn.

    Args:
        trainings: By round; None where nothing was recorded.
        detail: 1 for curves as fine as a page has room for, less for coarser ones.
    """
    drawn = [(number, training) for number, training in trainings.items() if training is not None]
    latest = drawn[-_TRAININGS:]
    captions = [
        Message("The measurements of each optimiser step of each round, and what the monitor detected and did.")
    ]
    if undrawn := len(drawn) - len(latest):
        captions.append(Message("The {count} earliest rounds are not drawn.", count=undrawn))
    lost = [number for number, training in trainings.items() if training is None]
    captions += [Message("The record of round {number}'s training is not at hand.", number=number) for number in lost]
    folds = [
        Fold(
            training.name,
            training_blocks(training, len(latest) / detail),
            remark=_remark(training),
            is_open=training is latest[-1][1],
        )
        for _, training in latest
    ]
    empty = Message("No round has trained yet.")
    return Section.of(Message("Training"), Message.joined(" ", captions), folds, empty=empty)


def training_blocks(training: TrainingCurves, among: float = 1) -> list[Block]:
    """Returns the curves, the decisions and the layers; the more trainings a page shows, the coarser."""
    decisions, layers = _decisions(training), layer_chart(training, among)
    return blocks(
        Text(_lines_sentence(training), "note"),
        _curves(training, among),
        (Text(Message("Decisions"), "heading"), decisions) if decisions else None,
        (Text(Message("Layers"), "heading"), layers) if layers else None,
    )


def headline(training: TrainingCurves) -> list[tuple[str, str, str]]:
    """Returns the headline numbers: value, name and remark."""
    values = training.values
    tokens, seconds = (float(np.nansum(values[key])) for key in ("tokens", "seconds"))
    first = Message("at first {loss}", loss=number_text(_first(values["loss"])))
    tiles: list[tuple[str, str, str]] = [(number_text(_last(values["loss"])), Message("loss"), first)]
    seen = Message("{count} tokens", count=f"{tokens:,.0f}") if tokens else ""
    tiles.append((f"{len(training.steps):,}", Message("steps"), seen))
    held_out = training.evaluation.get("loss", values["loss"][:0])
    if (known := held_out[~np.isnan(held_out)]).size:
        lowest = Message("lowest {loss}", loss=number_text(float(known.min())))
        # Of the weights that are the result: with patience these are the best ones, not the last.
        kept = held_out[training.steps == (training.result_steps or 0) - 1]
        value = float(kept[0]) if kept.size and not np.isnan(kept[0]) else float(known[-1])
        tiles.append((number_text(value), Message("{name} on held-out records", name=Message("loss")), lowest))
    if seconds and not np.isnan(values["tokens_per_second"]).all():
        tiles.append((format_seconds(seconds), Message("time"), Message("all steps together")))
        # The median, since the first step may have compiled for a minute.
        usual = float(np.nanmedian(values["tokens_per_second"]))
        tiles.append((number_text(usual), Message("tokens per second"), _median_mfu(values["mfu"])))
    if not np.isnan(values["memory_bytes"]).all():
        most = bytes_text(float(np.nanmax(values["memory_bytes"])))
        tiles.append((most, Message("memory"), Message("at most")))
    count = len(training.decisions)
    tiles.append((f"{count}", Message("decisions" if count != 1 else "decision"), Message("by the monitor")))
    return tiles


def loss_chart(training: TrainingCurves, among: float = 1) -> Chart | None:
    """Draws the loss, with a mark for each decision."""
    (key, name, style), *_ = MEASURES
    return _draw(training, name, training.values[key], style, among, small=False)


def layer_chart(training: TrainingCurves, among: float = 1) -> Chart | None:
    """Draws the gradient norm of each layer over the steps."""
    return strips(training.steps, training.groups, Message("gradient norm by layer"), int(_STRIP_CELLS / among))


def time_chart(training: TrainingCurves) -> Chart | None:
    """Draws the time of all steps by phase."""
    phases: dict[str, float] = {Message(name): seconds for name, seconds in training.phases.items()}
    rows = [("", phases)] if phases else []
    return stacked_bars(rows, list(phases), Message("where the time of all steps went"))


def evaluation_charts(training: TrainingCurves, among: float = 1) -> list[Chart | None]:
    """Draws what was measured on held-out records: the loss over that of the training, and each other value."""
    charts, buckets = list[Chart | None](), _bucket_count(training, among)
    for name, (title, values) in zip(training.evaluation, _on_held_out(training).items(), strict=True):
        steps, known = _measured(training.steps, values)
        if name == "loss":
            trained = (Message("training"), *_measured(training.steps, training.values[name]))
            runs = [trained, (Message("held-out records"), steps, known)]
            charts.append(compared_curves(runs, title, _PLAIN, buckets=buckets))
        else:
            charts.append(curve(steps, known, title, _PLAIN, buckets=buckets, small=True))
    return charts


def small_charts(training: TrainingCurves, among: float = 1) -> Grid:
    """Draws evaluations, the other measures, and what the objective measured."""
    measures = [(title, training.values[key], style) for key, title, style in MEASURES[1:]]
    measures += [(key, values, _PLAIN) for key, values in training.objective.items()]
    charts = (_draw(training, name, values, style, among, small=True) for name, values, style in measures)
    return Grid([chart for chart in (*evaluation_charts(training, among), *charts) if chart])


def compared_charts(trainings: Sequence[TrainingCurves]) -> Grid:
    """Draws the curves of several trainings over each other."""
    charts = []
    for key, title, style in MEASURES:
        if key in _COMPARED:
            charts.append(
                compared_curves([(each.name, each.steps, each.values[key]) for each in trainings], title, style)
            )
    others = [{**_on_held_out(each), **each.objective} for each in trainings]
    for name in dict.fromkeys(name for values in others for name in values):
        runs = [
            (each.name, *_measured(each.steps, values[name]))
            for each, values in zip(trainings, others, strict=True)
            if name in values
        ]
        charts.append(compared_curves(runs, name, _PLAIN))
    return Grid([chart for chart in charts if chart])


def differing_settings(names: Sequence[str], settings: Sequence[Mapping[str, str]]) -> Section:
    """Returns a table of the settings in which trainings differ."""
    rows = [
        (key, *(each.get(key, "–") for each in settings))
        for key in dict.fromkeys(key for each in settings for key in each)
    ]
    differing = Table((Message("setting"), *names), [row for row in rows if len(set(row[1:])) > 1])
    return Section(Message("Differences"), blocks(differing), Message("All settings and inputs are the same."))


def comparison_page(trainings: Sequence[TrainingCurves]) -> Page:
    """Returns the page that compares trainings: results, curves over each other, and the settings that differ."""
    names = [each.name for each in trainings]
    tiles = [{name: value for value, name, _ in headline(each)} for each in trainings]
    rows = [
        (tile, *(each.get(tile, "–") for each in tiles))
        for tile in dict.fromkeys(name for each in tiles for name in each)
    ]
    title = Message("{count} trainings", count=len(trainings))
    sections = [
        Section(Message("Results"), [Table((Message("result"), *names), rows)]),
        Section(Message("Curves"), [compared_charts(trainings)]),
        differing_settings(names, [each.config for each in trainings]),
    ]
    return Page(title, "trainings", Message.joined(", ", names), [], sections)


def unique_names(names: Sequence[str]) -> list[str]:
    """Returns the names, with its position where one stands several times."""
    return [
        name if names.count(name) == 1 else Message("{name} ({at})", name=name, at=at)
        for at, name in enumerate(names, 1)
    ]


def _on_held_out(training: TrainingCurves) -> dict[str, FloatArray]:
    """Returns what was measured on held-out records, by title."""
    return {
        Message("{name} on held-out records", name=Message("loss") if name == "loss" else name): values
        for name, values in training.evaluation.items()
    }


def _measured(steps: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Leaves out the steps without a value: a line through single points must not break at them."""
    known = ~np.isnan(values)
    return steps[known], values[known]


def _draw(
    training: TrainingCurves, name: str, values: FloatArray, style: CurveStyle, among: float, *, small: bool
) -> Chart | None:
    marks = [
        Annotation(
            decision.step,
            number,
            Message("{what}: {action}", what=truncate(decision.what, 120), action=_action(decision.action)),
        )
        for number, decision in enumerate(training.decisions, 1)
    ]
    buckets = _bucket_count(training, among)
    return curve(training.steps, values, name, style, marks=marks, buckets=buckets, small=small)


def _curves(training: TrainingCurves, among: float = 1) -> list[Block]:
    loss = loss_chart(training, among) or Text(Message("No finite loss has been measured."), "empty")
    return blocks(loss, small_charts(training, among))


def _lines_sentence(training: TrainingCurves) -> Message | str:
    window = smoothing_window(int((~np.isnan(training.values["loss"])).sum()))
    if window == 1:
        return ""
    return Message("The thin line is every step, the broad one the mean over {window} steps.", window=window)


def _remark(training: TrainingCurves) -> Message:
    (loss, _, first), (steps, _, _), *_ = headline(training)
    remark = Message("{steps} steps, loss {loss} ({first})", steps=steps, loss=loss, first=first)
    count = len(training.decisions)
    if not count:
        return remark
    decisions = Message("{count} decisions" if count > 1 else "{count} decision", count=count)
    return Message.joined(", ", [remark, decisions])


def _bucket_count(training: TrainingCurves, among: float) -> int:
    """Returns the number of stretches a curve is downsampled to, to stay within the page's budget."""
    # A stretch has two points of about 15 bytes, and the mean another.
    curves = len(MEASURES) + 1 + len(training.objective) + len(training.evaluation)
    return int(np.clip(_CURVE_BYTES / (among * curves * 45), 16, 320))


def _median_mfu(values: FloatArray) -> Message | str:
    if np.isnan(values).all():
        return ""
    return Message("{share} of the peak", share=_percent(float(np.nanmedian(values))))


def _first(values: FloatArray) -> float:
    finite = values[~np.isnan(values)]
    return float(finite[0]) if finite.size else float("nan")


def _last(values: FloatArray) -> float:
    """Averages the last steps, as many as the curve's moving average."""
    # One step's loss is noise, and the number must agree with the line drawn beside it.
    known = values[~np.isnan(values)]
    return float(known[-smoothing_window(len(known)) :].mean()) if known.size else float("nan")


def _decisions(training: TrainingCurves) -> Table | None:
    rows: list[tuple[str, ...]] = [
        (str(number), f"{each.step:,}", Message(_KINDS.get(each.kind, each.kind)), each.what, _done_about(each))
        for number, each in enumerate(training.decisions[:_MAX_DECISIONS], 1)
    ]
    if more := len(training.decisions) - len(rows):
        rows.append(("…", "", Message("{count} more", count=f"{more:,}"), "", Message("see metrics.jsonl")))
    columns = (Message("mark"), Message("step"), Message("what"), Message("seen"), Message("done about it"))
    return Table(columns, rows, name=Message("Decisions"), style="cards") if rows else None


def _done_about(decision: TrainingDecision) -> Message:
    action = _action(decision.action)
    return Message("{action} ({why})", action=action, why=decision.why) if decision.why else action


def _action(name: str) -> Message:
    return Message(_ACTIONS.get(name, name))
