"""Charts, tables and sentences about the rounds' batches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from posttrain.web.charts.bars import bars, series_class
from posttrain.web.charts.histogram import histogram
from posttrain.web.charts.rounds import Expectation, expectations
from posttrain.web.charts.scatter import Points, ScatterLayer, scatter
from posttrain.web.charts.svg import WIDE, responsive, ticks, truncate
from posttrain.web.formatting import (
    is_share,
    metric_name,
    number_text,
    percent_text,
    points_text,
    reason_text,
    selection_text,
)
from posttrain.web.page import Table
from posttrain.web.selection import SELECTIONS_SHOWN, ChosenRecord, PoolMap, RoundGain, Selection

_REASONS = ("strategy", "focus", "explore", "cold_start")
_SHAPES = ("circle", "diamond", "triangle", "square")
_MAPS = 600_000
"""Bytes that the points of all maps on a page may take together, about."""
_ROWS, _MOST = 1600, 200
"""Records that the tables of all rounds may list together, about, and that of one round."""
_BINS = 24
_INPUT = 160
"""Letters of a record's input."""


@dataclass(frozen=True)
class SelectionView:
    """A round's selection as markup and words; what is empty is not shown.

    Args:
        summary: how many of how many, and by which strategy.
        meanings: each reason, and what it means.
        worst: the classes that the focus was on.
        contents: of each of the ``records`` input, why it was chosen, and id.
    """

    selection: Selection
    summary: str
    reasons: Markup
    meanings: tuple[tuple[str, str], ...]
    worst: str
    map: Markup
    map_sentence: str
    histogram: Markup
    histogram_sentence: str
    gain: str
    records: Table
    contents: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class SelectionsView:
    """All rounds, the newest first; ``undrawn`` counts the earliest, of which only the expectations are shown."""

    rounds: tuple[SelectionView, ...]
    undrawn: int
    gains: tuple[tuple[str, Markup], ...]
    gain_numbers: Table


def selections_view(selections: Sequence[Selection]) -> SelectionsView:
    """Everything about the rounds' selections; maps are the sparser, the more of them the page shows."""
    latest = selections[-SELECTIONS_SHOWN:]
    gains = [one.gain for one in selections if one.gain]
    return SelectionsView(
        rounds=tuple(_selection_view(one, len(latest)) for one in reversed(latest)),
        undrawn=len(selections) - len(latest),
        gains=tuple(_gain_charts(gains)),
        gain_numbers=_gain_numbers(gains),
    )


def _selection_view(one: Selection, among: int) -> SelectionView:
    reasons = _ordered_reasons(one.reasons)
    counts = [(reason_text(name), float(one.reasons[name]), f"{one.reasons[name]:,}") for name in reasons]
    colours = [series_class(_reason_index(name, reasons)) for name in reasons]
    rows = int(np.clip(_ROWS / among, 50, _MOST))
    counted = responsive(_histogram, one)
    return SelectionView(
        selection=one,
        summary=_summary(one),
        reasons=responsive(bars, counts, f"records of round {one.round} by reason", classes=colours),
        meanings=tuple((reason_text(name), selection_text(name, one.strategy)) for name in reasons),
        worst=", ".join(one.worst_classes) if "focus" in one.reasons else "",
        map=responsive(_map, one, one.map, rows, among) if one.map else Markup(),
        map_sentence=_map_sentence(one.map) if one.map else "",
        histogram=counted,
        histogram_sentence=_histogram_sentence(one) if counted else "",
        gain=_gain_sentence(one.gain) if one.gain else "",
        records=_records(one, rows),
        contents=tuple(_content(record) for record in one.chosen[:rows]),
    )


def _summary(one: Selection) -> str:
    of = f"{one.embedded:,} {'embedded' if one.scored < one.embedded else 'scored'}"
    of += f", a sample of {one.pool:,}" if one.embedded < one.pool else ""
    of += f", {one.scored:,} of them scored" if 0 < one.scored < one.embedded else ""
    why = "" if one.unshared is None else f", as neighbours hardly share labels (kappa {one.unshared:.2f})"
    return f"{one.records:,} of {of}, by {one.strategy}{why}"


def _ordered_reasons(reasons: Iterable[str]) -> list[str]:
    """Those that every report knows first, then others by name, so that a colour means the same in all rounds."""
    known = [name for name in _REASONS if name in reasons]
    return known + sorted(name for name in reasons if name not in _REASONS)


def _reason_index(reason: str, reasons: Sequence[str]) -> int:
    if reason in _REASONS:
        return _REASONS.index(reason)
    return len(_REASONS) + [name for name in reasons if name not in _REASONS].index(reason)


def _map(one: Selection, places: PoolMap, told: int, among: int, width: int) -> str:
    """The map; of the first ``told`` records it tells what they are, where there is a pointer to ask with."""
    room = int(np.clip(_MAPS / (among * 2 * 10), 200, 3000))
    reasons = _ordered_reasons({record.reason for record in one.chosen})
    layers = [
        ScatterLayer("pool", _subsampled(places.pool, room), "pool", "dot"),
        ScatterLayer("labelled before", _subsampled(places.labelled, room // 2), "labelled", "cross"),
    ]
    for reason in reasons:
        some = [record for record in one.chosen if record.reason == reason and record.id in places.chosen]
        number = _reason_index(reason, reasons)
        layers.append(
            ScatterLayer(
                f"chosen: {reason_text(reason)}",
                np.array([places.chosen[record.id] for record in some]).reshape(-1, 2),
                f"chosen {series_class(number)}",
                _SHAPES[number % len(_SHAPES)],
                [_point_label(record) for record in some if record.rank <= told and width >= WIDE],
            )
        )
    title = (
        f"map of round {one.round}: {len(places.chosen):,} chosen records among {len(places.pool):,} others of the pool"
        f" and {len(places.labelled):,} labelled before; the table below lists the chosen ones"
    )
    return scatter(layers, title, width=width)


def _subsampled(points: Points, room: int) -> Points:
    """At most about ``room`` of the points, evenly taken."""
    return points[:: max(1, -(-len(points) // room))]


def _point_label(record: ChosenRecord) -> str:
    words = f"{record.rank}, {reason_text(record.reason)}"
    words += f", predicted {truncate(record.predicted, 40, 1)}" if record.predicted else ""
    return f"{words}: {truncate(record.input, 90, 1)}"


def _map_sentence(places: PoolMap) -> str:
    beside = f" and {len(places.labelled):,} that had a label" if len(places.labelled) else ""
    return (
        f"{len(places.chosen):,} chosen records among {len(places.pool):,} others of the pool{beside}: points that lie"
        " together say alike to the model; directions and distances between groups mean nothing"
    )


def _histogram(one: Selection, width: int) -> str:
    values = np.concatenate([one.scores, one.scored_since])
    values = values[np.isfinite(values)]
    if not values.size:
        return ""
    edges = np.unique(ticks(float(values.min()), float(values.max()), _BINS))
    if len(edges) < 2:  # all scores are one
        edges = np.array([values[0] - 0.5, values[0] + 0.5])
    counts, chosen = (np.histogram(some.clip(edges[0], edges[-1]), edges)[0] for some in (values, _chosen_scores(one)))
    return histogram(
        edges.tolist(),
        counts.tolist(),
        _score_name(one.score),
        number_text,
        part=chosen.tolist(),
        names=("scored", "chosen"),
        width=width,
    )


def _chosen_scores(one: Selection) -> np.ndarray:
    return np.array([record.score for record in one.chosen if record.score is not None], np.float64)


def _score_name(name: str) -> str:
    return f"{reason_text(name)} in nats" if name == "entropy" else reason_text(name)


def _histogram_sentence(one: Selection) -> str:
    chosen, every = _chosen_scores(one), one.scores[np.isfinite(one.scores)]
    found = []
    if chosen.size:
        said = f"{number_text(float(np.median(chosen)))} against {number_text(float(np.median(every)))}"
        sample = "the sample of the pool that was scored" if one.scored < one.pool else "all that were scored"
        found.append(f"Median {reason_text(one.score)} of the chosen records against {sample}: {said}")
    if {"temperature", "ece_before", "ece_after"} <= one.calibration.keys():
        temperature, before, after = (one.calibration[name] for name in ("temperature", "ece_before", "ece_after"))
        errors = f"{percent_text(before)} before and {percent_text(after)} after"
        found.append(
            f"Not calibrated, as that would not help: the expected calibration error was {errors}"
            if temperature == 1.0
            else f"Calibrated by temperature {number_text(temperature)}: the expected calibration error was {errors}"
        )
    return ". ".join(found)


def _records(one: Selection, rows: int) -> Table:
    """Rank, reason, score and answers of the first ``rows`` records; columns that have nothing are left out."""
    shown = one.chosen[:rows]
    columns = {
        "rank": [f"{record.rank:,}" for record in shown],
        "reason": [reason_text(record.reason) for record in shown],
        reason_text(one.score): ["" if record.score is None else number_text(record.score) for record in shown],
        "predicted": [truncate(record.predicted or "", 60, 1) for record in shown],
        "label": [truncate(record.label or "", 60, 1) for record in shown],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    return tuple(filled), list(zip(*filled.values(), strict=True))


def _content(record: ChosenRecord) -> tuple[str, str, str]:
    """What a record asks, why it was chosen, and its id."""
    drawn = f"drawn with probability {number_text(record.inclusion)}" if record.inclusion is not None else ""
    return truncate(record.input, _INPUT, 1), "; ".join(filter(None, (record.why, drawn))), record.id


def _gain_charts(gains: Sequence[RoundGain]) -> Iterable[tuple[str, Markup]]:
    """A chart for each metric, as each has its own unit."""
    for metric in dict.fromkeys(gain.metric for gain in gains):
        some = [gain for gain in gains if gain.metric == metric]
        title = f"expected and achieved gain in {metric_name(metric)} over the champion, by round"
        yield _unit(metric), responsive(_gain_chart, some, metric, title)


def _gain_chart(gains: Sequence[RoundGain], metric: str, title: str, width: int) -> str:
    name = "round {}" if width >= 500 else "r{}"
    rows = [Expectation(name.format(one.round), one.expected, one.low, one.high, one.achieved) for one in gains]
    return expectations(rows, title, lambda value: _difference(metric, value), width=width)


def _gain_numbers(gains: Sequence[RoundGain]) -> Table:
    rows: list[tuple[str, ...]] = []
    for one in gains:
        expected, low, high = (_difference(one.metric, value) for value in (one.expected, one.low, one.high))
        achieved = "–" if one.achieved is None else _difference(one.metric, one.achieved)
        rows.append((f"{one.round}", _unit(one.metric), expected, f"{low} to {high}", achieved))
    return ("round", "gain", "expected", "interval", "achieved"), rows


def _gain_sentence(one: RoundGain) -> str:
    expected, low, high = (_difference(one.metric, value) for value in (one.expected, one.low, one.high))
    said = f"Expected gain in {_unit(one.metric)}: {expected} ({low} to {high})"
    return f"{said}; achieved: {_difference(one.metric, one.achieved)}" if one.achieved is not None else said


def _difference(metric: str, value: float) -> str:
    if is_share(metric):
        return points_text(value)
    return f"{value:+.3g}".replace("-", "−")


def _unit(metric: str) -> str:
    return f"{metric_name(metric)}, in points" if is_share(metric) else metric_name(metric)
