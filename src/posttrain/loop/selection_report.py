"""The section on the rounds' batches: why their records were chosen, where they lie, and what they gained."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from posttrain.loop.selections import SELECTIONS_SHOWN, ChosenRecord, PoolMap, RoundGain, Selection
from posttrain.report.charts.bars import bars
from posttrain.report.charts.chart import Chart, series_colour, ticks, truncate
from posttrain.report.charts.curve import FloatArray
from posttrain.report.charts.histogram import histogram
from posttrain.report.charts.rounds import Expectation, expectations
from posttrain.report.charts.scatter import Points, ScatterLayer, scatter
from posttrain.report.formatting import is_share, metric_name, number_text, percent_text, points_text, reason_text
from posttrain.report.section import Block, Cell, Fold, Items, Section, Table, Text, blocks
from posttrain.store.message import Message

_MEANINGS = {
    "strategy": "chosen by {strategy} from the whole pool",
    "focus": "chosen by {strategy} among records near what evaluation found weakest",
    "explore": "drawn at random from the whole pool, whatever the model says",
    "cold_start": "chosen by {strategy} to cover the pool, as the confidence of an untrained model says nothing",
}
_RANDOM_COLD_START = "drawn at random, as the confidence of an untrained model says nothing"

_SHAPES = ("circle", "diamond", "triangle", "square")
_MAP_BYTES = 80_000
"""Approximate budget for the points of all maps on a page."""
_ROWS, _MOST = 1000, 200
"""Approximate number of records in the tables of all rounds together, and the most in one."""
_BINS = 24
_INPUT = 160
"""Letters shown of a record's input."""


def selection_section(selections: Sequence[Selection], detail: float = 1.0) -> Section:
    """Shows all batches, the newest first; the more of them a page shows, the sparser the maps.

    Args:
        selections: The batches, oldest first; the earliest ones show only their expected gain.
        detail: 1 for all points and rows that a page has room for, less for fewer of them.
    """
    latest = selections[-SELECTIONS_SHOWN:]
    gains = [selection.gain for selection in selections if selection.gain]
    undrawn = Message("The batches of the {count} earliest rounds are not drawn.", count=len(selections) - len(latest))
    caption = Message("The records that each round selected for labelling, and why.")
    if len(latest) < len(selections):
        caption = Message.joined(" ", [caption, undrawn])
    folds = [
        Fold(
            Message("round {number}", number=selection.round),
            _batch_blocks(selection, len(latest) / detail),
            remark=_summary(selection),
            is_open=selection is latest[-1],
        )
        for selection in reversed(latest)
    ]
    empty = Message("No round has chosen records yet.")
    return Section.of(Message("Selection"), caption, _gain_blocks(gains), folds, empty=empty)


def _batch_blocks(selection: Selection, among: float) -> list[Block]:
    reasons = _ordered_reasons(selection.reasons)
    counts = [(reason_text(name), float(selection.reasons[name]), f"{selection.reasons[name]:,}") for name in reasons]
    colours = [series_colour(_reason_index(name, reasons)) for name in reasons]
    title = Message("records of round {number} by reason", number=selection.round)
    chart = bars(counts, title, colours=colours, columns=(Message("reason"), Message("records")))
    rows = int(np.clip(_ROWS / among, 10, _MOST))
    counted = _histogram(selection)
    return blocks(
        (Text(sentence, "note") for sentence in selection.missing),
        Text(_gain_sentence(selection), "sentence"),
        Text(_stop_sentence(selection), "sentence"),
        (Text(Message("Reasons"), "heading"), chart, Items(_meanings(selection, reasons))) if chart else None,
        _map_blocks(selection, selection.map, rows, among) if selection.map else None,
        (Text(Message("Score"), "heading"), *_histogram_sentences(selection), counted) if counted else None,
        _records(selection, rows),
    )


def _summary(selection: Selection) -> Message:
    values = {name: f"{getattr(selection, name):,}" for name in ("records", "embedded", "pool", "scored")}
    is_part = selection.scored < selection.embedded
    parts = [Message("{records} of {embedded} embedded" if is_part else "{records} of {embedded} scored", **values)]
    if selection.embedded < selection.pool:
        parts.append(Message("a sample of {pool}", **values))
    if 0 < selection.scored < selection.embedded:
        parts.append(Message("{scored} of them scored", **values))
    parts.append(Message("by {strategy}", strategy=selection.strategy))
    if selection.neighbour_kappa is not None:
        parts.append(Message("as neighbours hardly share labels (kappa {kappa:.2f})", kappa=selection.neighbour_kappa))
    return Message.joined(", ", parts)


def _meanings(selection: Selection, reasons: Sequence[str]) -> list[tuple[str, str]]:
    """Returns each known reason, and what it means."""
    meanings: list[tuple[str, str]] = []
    for name in reasons:
        template = _MEANINGS.get(name, "")
        if (name, selection.strategy) == ("cold_start", "random"):
            template = _RANDOM_COLD_START
        if not template:
            continue
        meaning = Message(template, strategy=selection.strategy)
        if name == "focus" and selection.worst_classes:
            worst = ", ".join(selection.worst_classes)
            meaning = Message("{meaning}; the weakest classes were {worst}", meaning=meaning, worst=worst)
        meanings.append((reason_text(name), meaning))
    return meanings


def _ordered_reasons(reasons: Iterable[str]) -> list[str]:
    """Sorts the common reasons first, so that a colour means the same in all rounds."""
    present = [name for name in _MEANINGS if name in reasons]
    return present + sorted(name for name in reasons if name not in _MEANINGS)


def _reason_index(reason: str, reasons: Sequence[str]) -> int:
    known = list(_MEANINGS)
    return known.index(reason) if reason in known else len(known) + [n for n in reasons if n not in known].index(reason)


def _map_blocks(selection: Selection, pool_map: PoolMap, label_limit: int, among: float) -> list[Block]:
    """Draws the map; the first ``label_limit`` records get tooltips."""
    room = int(np.clip(_MAP_BYTES / (among * 10), 100, 3000))
    reasons = _ordered_reasons({record.reason for record in selection.chosen})
    layers = [
        ScatterLayer(Message("pool"), _subsampled(pool_map.pool, room), "$gray", "dot"),
        ScatterLayer(Message("labelled before"), _subsampled(pool_map.labelled, room // 2), "$soft", "cross"),
    ]
    for reason in reasons:
        records = [record for record in selection.chosen if record.reason == reason and record.id in pool_map.chosen]
        number = _reason_index(reason, reasons)
        layers.append(
            ScatterLayer(
                Message("chosen: {reason}", reason=reason_text(reason)),
                np.array([pool_map.chosen[record.id] for record in records]).reshape(-1, 2),
                series_colour(number),
                _SHAPES[number % len(_SHAPES)],
                [_point_label(record) for record in records if record.rank <= label_limit],
            )
        )
    counts = {"chosen": f"{len(pool_map.chosen):,}", "pool": f"{len(pool_map.pool):,}"}
    counts |= {"labelled": f"{len(pool_map.labelled):,}", "round": str(selection.round)}
    title = Message(
        "map of round {round}: {chosen} chosen records among {pool} others of the pool and {labelled} labelled before; "
        "the table below lists the chosen ones",
        **counts,
    )
    template = "{chosen} chosen records among {pool} others of the pool" + (
        " and {labelled} that had a label" if len(pool_map.labelled) else ""
    )
    meaning = Message(
        "{counts}: points that are close are similar to the model; directions and distances between groups mean "
        "nothing",
        counts=Message(template, **counts),
    )
    chart = scatter(layers, title)
    return blocks(Text(Message("Map of the pool"), "heading"), Text(meaning, "sentence"), chart) if chart else []


def _subsampled(points: Points, room: int) -> Points:
    """Returns at most about ``room`` evenly spaced points."""
    # Evenly spaced instead of random: the same report is the same bytes.
    return points[:: max(1, -(-len(points) // room))]


def _point_label(record: ChosenRecord) -> str:
    label = f"{record.rank}, {reason_text(record.reason)}"
    label += f", predicted {truncate(record.predicted, 40)}" if record.predicted else ""
    return f"{label}: {truncate(record.input, 90)}"


def _histogram(selection: Selection) -> Chart | None:
    values = np.concatenate([selection.scores, selection.scored_since])
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    # Tiny ranges can round two ticks to the same number, and a histogram needs rising edges.
    edges = np.unique(ticks(float(values.min()), float(values.max()), _BINS))
    # All scores are equal: one bin around them.
    if len(edges) < 2:
        edges = np.array([values[0] - 0.5, values[0] + 0.5])
    counts, chosen = (
        np.histogram(subset.clip(edges[0], edges[-1]), edges)[0] for subset in (values, _chosen_scores(selection))
    )
    unit = Message("entropy in nats") if selection.score == "entropy" else reason_text(selection.score)
    names = (Message("scored"), Message("chosen"))
    return histogram(edges.tolist(), counts.tolist(), unit, number_text, part=chosen.tolist(), names=names)


def _chosen_scores(selection: Selection) -> FloatArray:
    return np.array([record.score for record in selection.chosen if record.score is not None], np.float64)


def _histogram_sentences(selection: Selection) -> Iterator[Text]:
    chosen, every = _chosen_scores(selection), selection.scores[np.isfinite(selection.scores)]
    if chosen.size:
        template = "Median {score} of the chosen records against {sample}: {chosen} against {all}"
        sample = (
            "the sample of the pool that was scored" if selection.scored < selection.pool else "all that were scored"
        )
        medians = {"chosen": number_text(float(np.median(chosen))), "all": number_text(float(np.median(every)))}
        yield Text(Message(template, score=reason_text(selection.score), sample=Message(sample), **medians), "sentence")
    if {"temperature", "ece_before", "ece_after"} <= selection.calibration.keys():
        temperature, before, after = (
            selection.calibration[name] for name in ("temperature", "ece_before", "ece_after")
        )
        values = {"temperature": number_text(temperature), "before": percent_text(before), "after": percent_text(after)}
        template = (
            "Calibrated by temperature {temperature}: the expected calibration error was {before} before and {after} "
            "after"
        )
        if temperature == 1.0:
            template = (
                "Not calibrated, as that would not help: the expected calibration error was {before} before and "
                "{after} after"
            )
        yield Text(Message(template, **values), "sentence")


def _records(selection: Selection, rows: int) -> Fold | None:
    """Lists the first ``rows`` records, without empty columns."""
    records = selection.chosen[:rows]
    columns: dict[str, list[str]] = {
        Message("rank"): [f"{record.rank:,}" for record in records],
        Message("reason"): [reason_text(record.reason) for record in records],
        reason_text(selection.score): ["" if record.score is None else number_text(record.score) for record in records],
        Message("predicted"): [truncate(record.predicted or "", 60) for record in records],
        Message("label"): [truncate(record.label or "", 60) for record in records],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    table = list(zip(*filled.values(), [_content(record) for record in records], strict=True))
    name = Message("All {count} records", count=len(records))
    if len(records) < selection.records:
        name = Message("The first {count} of {all} records", count=len(records), all=f"{selection.records:,}")
    return Fold(name, [Table((*filled, Message("record")), table, name=name, style="cards")]) if records else None


def _content(record: ChosenRecord) -> Cell:
    """Returns a record's input, the reason for choosing it, and its id."""
    reasons = [record.why] if record.why else []
    if record.inclusion is not None:
        reasons.append(Message("drawn with probability {probability}", probability=number_text(record.inclusion)))
    return Cell(truncate(record.input, _INPUT), Message.joined("; ", reasons), record.id)


def _gain_blocks(gains: Sequence[RoundGain]) -> list[Block]:
    """Draws expected and achieved gains, a chart for each metric, because each has its own unit."""
    shown: list[Block] = []
    note = Message(
        "The gain expected from a round's labels before they were given, and the gain of its candidate over the "
        "champion on the same records."
    )
    for metric in dict.fromkeys(gain.metric for gain in gains):
        rows = [
            Expectation(Message("round {number}", number=gain.round), gain.expected, gain.low, gain.high, gain.achieved)
            for gain in gains
            if gain.metric == metric
        ]
        template = "expected and achieved gain in {metric} over the champion, by round"
        chart = expectations(rows, Message(template, metric=metric_name(metric)), partial(_difference, metric))
        heading = Message("Expected and achieved gain in {unit}", unit=_unit(metric))
        shown += blocks(Text(heading, "heading"), Text(note, "note"), chart)
    return shown


def _gain_sentence(selection: Selection) -> Message | str:
    gain = selection.gain
    if gain is None:
        if not selection.gain_unknown:
            return ""
        return Message("No gain was expected of the batch: {why}", why=selection.gain_unknown)
    expected, low, high = (_difference(gain.metric, value) for value in (gain.expected, gain.low, gain.high))
    values = {"unit": _unit(gain.metric), "expected": expected, "low": low, "high": high}
    sentence = Message("Expected gain in {unit}: {expected} ({low} to {high})", **values)
    if gain.achieved is None:
        return sentence
    return Message("{expected}; achieved: {gain}", expected=sentence, gain=_difference(gain.metric, gain.achieved))


def _stop_sentence(selection: Selection) -> Message | str:
    why = selection.stop_reason
    return Message("More labels may no longer pay off: {why}", why=why) if why else ""


def _difference(metric: str, value: float) -> str:
    return points_text(value) if is_share(metric) else f"{value:+.3g}".replace("-", "−")


def _unit(metric: str) -> Message:
    template = "{metric}, in points" if is_share(metric) else "{metric}"
    return Message(template, metric=metric_name(metric))
