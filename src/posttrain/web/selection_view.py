"""Builds the charts, tables and sentences about the rounds' batches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.report.charts.bars import bars
from posttrain.report.charts.chart import Chart, series_colour, ticks, truncate
from posttrain.report.charts.histogram import histogram
from posttrain.report.charts.rounds import Expectation, expectations
from posttrain.report.charts.scatter import Points, ScatterLayer, scatter
from posttrain.report.formatting import (
    is_share,
    metric_name,
    number_text,
    percent_text,
    points_text,
    reason_text,
    selection_text,
)
from posttrain.web.page import Table
from posttrain.web.selection_reader import SELECTIONS_SHOWN, ChosenRecord, PoolMap, RoundGain, Selection

_REASONS = ("strategy", "focus", "explore", "cold_start")
_SHAPES = ("circle", "diamond", "triangle", "square")
_MAPS = 80_000
"""Approximate budget in bytes for the points of all maps on a page."""
_ROWS, _MOST = 1000, 200
"""Approximate number of records in the tables of all rounds together, and the most in one."""
_BINS = 24
_INPUT = 160
"""Letters shown of a record's input."""


@dataclass(frozen=True)
class SelectionView:
    """A round's selection as charts, tables and sentences; empty fields are not shown.

    Args:
        summary: how many of how many, and by which strategy.
        meanings: each reason, and what it means.
        worst: the classes that the focus was on.
        contents: of each of the ``records`` input, why it was chosen, and id.
    """

    selection: Selection
    summary: str
    reasons: Chart | None
    meanings: tuple[tuple[str, str], ...]
    worst: str
    map: Chart | None
    map_sentence: str
    histogram: Chart | None
    histogram_sentence: str
    gain: str
    records: Table
    contents: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class SelectionsView:
    """All rounds, the newest first; ``undrawn`` counts the earliest, which show only their expected gain."""

    rounds: tuple[SelectionView, ...]
    undrawn: int
    gains: tuple[tuple[str, Chart | None], ...]
    gain_numbers: Table


def selections_view(selections: Sequence[Selection], detail: float = 1.0) -> SelectionsView:
    """Builds the view of all selections; the more of them a page shows, the sparser the maps.

    Args:
        detail: 1 for all points and rows that a page has room for, less for fewer of them.
    """
    latest = selections[-SELECTIONS_SHOWN:]
    gains = [selection.gain for selection in selections if selection.gain]
    return SelectionsView(
        rounds=tuple(_selection_view(selection, len(latest) / detail) for selection in reversed(latest)),
        undrawn=len(selections) - len(latest),
        gains=tuple(_gain_charts(gains)),
        gain_numbers=_gain_numbers(gains),
    )


def _selection_view(selection: Selection, among: float) -> SelectionView:
    reasons = _ordered_reasons(selection.reasons)
    counts = [(reason_text(name), float(selection.reasons[name]), f"{selection.reasons[name]:,}") for name in reasons]
    colours = [series_colour(_reason_index(name, reasons)) for name in reasons]
    rows = int(np.clip(_ROWS / among, 10, _MOST))
    counted = _histogram(selection)
    return SelectionView(
        selection=selection,
        summary=_summary(selection),
        reasons=bars(
            counts, f"records of round {selection.round} by reason", colours=colours, columns=("reason", "records")
        ),
        meanings=tuple((reason_text(name), selection_text(name, selection.strategy)) for name in reasons),
        worst=", ".join(selection.worst_classes) if "focus" in selection.reasons else "",
        map=_map(selection, selection.map, rows, among) if selection.map else None,
        map_sentence=_map_sentence(selection.map) if selection.map else "",
        histogram=counted,
        histogram_sentence=_histogram_sentence(selection) if counted else "",
        gain=_gain_sentence(selection.gain) if selection.gain else "",
        records=_records(selection, rows),
        contents=tuple(_content(record) for record in selection.chosen[:rows]),
    )


def _summary(selection: Selection) -> str:
    of = f"{selection.embedded:,} {'embedded' if selection.scored < selection.embedded else 'scored'}"
    of += f", a sample of {selection.pool:,}" if selection.embedded < selection.pool else ""
    of += f", {selection.scored:,} of them scored" if 0 < selection.scored < selection.embedded else ""
    kappa = selection.neighbour_kappa
    why = "" if kappa is None else f", as neighbours hardly share labels (kappa {kappa:.2f})"
    return f"{selection.records:,} of {of}, by {selection.strategy}{why}"


def _ordered_reasons(reasons: Iterable[str]) -> list[str]:
    """Sorts the common reasons first, so that a colour means the same in all rounds."""
    present = [name for name in _REASONS if name in reasons]
    return present + sorted(name for name in reasons if name not in _REASONS)


def _reason_index(reason: str, reasons: Sequence[str]) -> int:
    if reason in _REASONS:
        return _REASONS.index(reason)
    return len(_REASONS) + [name for name in reasons if name not in _REASONS].index(reason)


def _map(selection: Selection, pool_map: PoolMap, label_limit: int, among: float) -> Chart | None:
    """Draws the map; the first ``label_limit`` records get tooltips."""
    room = int(np.clip(_MAPS / (among * 10), 100, 3000))
    reasons = _ordered_reasons({record.reason for record in selection.chosen})
    layers = [
        ScatterLayer("pool", _subsampled(pool_map.pool, room), "$gray", "dot"),
        ScatterLayer("labelled before", _subsampled(pool_map.labelled, room // 2), "$soft", "cross"),
    ]
    for reason in reasons:
        records = [record for record in selection.chosen if record.reason == reason and record.id in pool_map.chosen]
        number = _reason_index(reason, reasons)
        layers.append(
            ScatterLayer(
                f"chosen: {reason_text(reason)}",
                np.array([pool_map.chosen[record.id] for record in records]).reshape(-1, 2),
                series_colour(number),
                _SHAPES[number % len(_SHAPES)],
                [_point_label(record) for record in records if record.rank <= label_limit],
            )
        )
    title = (
        f"map of round {selection.round}: {len(pool_map.chosen):,} chosen records among"
        f" {len(pool_map.pool):,} others of the pool"
        f" and {len(pool_map.labelled):,} labelled before; the table below lists the chosen ones"
    )
    return scatter(layers, title)


def _subsampled(points: Points, room: int) -> Points:
    """Returns at most about ``room`` evenly spaced points."""
    # Evenly spaced instead of random: the same report is the same bytes.
    return points[:: max(1, -(-len(points) // room))]


def _point_label(record: ChosenRecord) -> str:
    label = f"{record.rank}, {reason_text(record.reason)}"
    label += f", predicted {truncate(record.predicted, 40)}" if record.predicted else ""
    return f"{label}: {truncate(record.input, 90)}"


def _map_sentence(pool_map: PoolMap) -> str:
    labelled = f" and {len(pool_map.labelled):,} that had a label" if len(pool_map.labelled) else ""
    return (
        f"{len(pool_map.chosen):,} chosen records among {len(pool_map.pool):,} others of the pool{labelled}:"
        " points that are close are similar to the model; directions and distances between groups mean nothing"
    )


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
    return histogram(
        edges.tolist(),
        counts.tolist(),
        _score_name(selection.score),
        number_text,
        part=chosen.tolist(),
        names=("scored", "chosen"),
    )


def _chosen_scores(selection: Selection) -> np.ndarray:
    return np.array([record.score for record in selection.chosen if record.score is not None], np.float64)


def _score_name(name: str) -> str:
    return f"{reason_text(name)} in nats" if name == "entropy" else reason_text(name)


def _histogram_sentence(selection: Selection) -> str:
    chosen, every = _chosen_scores(selection), selection.scores[np.isfinite(selection.scores)]
    sentences = []
    if chosen.size:
        medians = f"{number_text(float(np.median(chosen)))} against {number_text(float(np.median(every)))}"
        sample = (
            "the sample of the pool that was scored" if selection.scored < selection.pool else "all that were scored"
        )
        sentences.append(f"Median {reason_text(selection.score)} of the chosen records against {sample}: {medians}")
    if {"temperature", "ece_before", "ece_after"} <= selection.calibration.keys():
        temperature, before, after = (
            selection.calibration[name] for name in ("temperature", "ece_before", "ece_after")
        )
        errors = f"{percent_text(before)} before and {percent_text(after)} after"
        sentences.append(
            f"Not calibrated, as that would not help: the expected calibration error was {errors}"
            if temperature == 1.0
            else f"Calibrated by temperature {number_text(temperature)}: the expected calibration error was {errors}"
        )
    return ". ".join(sentences)


def _records(selection: Selection, rows: int) -> Table:
    """Builds the table of the first ``rows`` records; drops empty columns."""
    records = selection.chosen[:rows]
    columns = {
        "rank": [f"{record.rank:,}" for record in records],
        "reason": [reason_text(record.reason) for record in records],
        reason_text(selection.score): ["" if record.score is None else number_text(record.score) for record in records],
        "predicted": [truncate(record.predicted or "", 60) for record in records],
        "label": [truncate(record.label or "", 60) for record in records],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    return tuple(filled), list(zip(*filled.values(), strict=True))


def _content(record: ChosenRecord) -> tuple[str, str, str]:
    """Returns a record's input, the reason for choosing it, and its id."""
    probability = f"drawn with probability {number_text(record.inclusion)}" if record.inclusion is not None else ""
    return truncate(record.input, _INPUT), "; ".join(filter(None, (record.why, probability))), record.id


def _gain_charts(gains: Sequence[RoundGain]) -> Iterable[tuple[str, Chart | None]]:
    """Yields a chart for each metric, because each has its own unit."""
    for metric in dict.fromkeys(gain.metric for gain in gains):
        of_metric = [gain for gain in gains if gain.metric == metric]
        title = f"expected and achieved gain in {metric_name(metric)} over the champion, by round"
        yield _unit(metric), _gain_chart(of_metric, metric, title)


def _gain_chart(gains: Sequence[RoundGain], metric: str, title: str) -> Chart | None:
    rows = [Expectation(f"round {gain.round}", gain.expected, gain.low, gain.high, gain.achieved) for gain in gains]
    return expectations(rows, title, lambda value: _difference(metric, value))


def _gain_numbers(gains: Sequence[RoundGain]) -> Table:
    rows: list[tuple[str, ...]] = []
    for gain in gains:
        expected, low, high = (_difference(gain.metric, value) for value in (gain.expected, gain.low, gain.high))
        achieved = "–" if gain.achieved is None else _difference(gain.metric, gain.achieved)
        rows.append((f"{gain.round}", _unit(gain.metric), expected, f"{low} to {high}", achieved))
    return ("round", "gain", "expected", "interval", "achieved"), rows


def _gain_sentence(gain: RoundGain) -> str:
    expected, low, high = (_difference(gain.metric, value) for value in (gain.expected, gain.low, gain.high))
    sentence = f"Expected gain in {_unit(gain.metric)}: {expected} ({low} to {high})"
    return f"{sentence}; achieved: {_difference(gain.metric, gain.achieved)}" if gain.achieved is not None else sentence


def _difference(metric: str, value: float) -> str:
    if is_share(metric):
        return points_text(value)
    return f"{value:+.3g}".replace("-", "−")


def _unit(metric: str) -> str:
    return f"{metric_name(metric)}, in points" if is_share(metric) else metric_name(metric)
