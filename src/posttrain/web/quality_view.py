"""Builds the tables and charts of the quality report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.report.charts.bars import bars
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.curve import CurveStyle, compared_curves
from posttrain.report.charts.heat_map import heat_map
from posttrain.report.charts.rounds import Expectation, intervals
from posttrain.report.formatting import number_text
from posttrain.web.page import Table, Tile
from posttrain.web.translations import Translator

_CLASSES = 40
_PAIRS = 50
_CONFUSED = 10
_CHARTS = 8

Json = Mapping[str, Any]


@dataclass(frozen=True)
class QualityView:
    """The quality report as tiles, tables and charts; a chart is None where nothing was measured."""

    tiles: list[Tile]
    overall: Table
    by_class: Table
    classes: Chart | None
    by_pair: Table
    gold: Chart | None
    gold_classes: Table
    people: Table
    confusion: Chart | None
    confusions: list[tuple[str, Table]]
    work: Table
    time: Chart | None
    drift: Chart | None
    suggestions: Table
    alarms: list[Json]


def quality_view(report: Json, translate: Translator) -> QualityView:
    """Builds the view of a report of `posttrain.label.quality.queue_report.QueueReports`."""
    agreement, behaviour = report["agreement"], report["behaviour"]
    return QualityView(
        tiles=_tiles(report, translate),
        overall=_overall(agreement, translate),
        by_class=_by_class(agreement["by_class"], translate),
        classes=_class_chart(agreement["by_class"], translate),
        by_pair=_by_pair(agreement["by_pair"], translate),
        gold=_gold_chart(report["gold"]["by_annotator"], translate),
        gold_classes=_rates(report["gold"]["by_class"], translate, "quality.class"),
        people=_people(report, translate),
        confusion=_confusion_chart(report["annotators"], translate("quality.confusion_chart")),
        confusions=_confusions(report["annotators"], translate),
        work=_work(report["work"], translate),
        time=_time_chart(report["work"], translate("quality.time_chart")),
        drift=_drift_chart(behaviour["errors"], translate),
        suggestions=_suggestions(behaviour["suggestions"], translate),
        alarms=[{**alarm, "sentence": translate.line(alarm["sentence"])} for alarm in report["alarms"]],
    )


def _tiles(report: Json, translate: Translator) -> list[Tile]:
    counts, outlook = report["counts"], report["outlook"]
    agreement, gold = report["agreement"], report["gold"]
    tiles = [(f"{counts['answers']:,}", translate("quality.answers"), translate("quality.of_people", **counts))]
    tiles.append(
        (_percent(agreement["percent"]["value"]), translate("quality.agreement"), _interval(agreement["percent"]))
    )
    tiles.append((_number(agreement["alpha"]["value"]), translate("quality.alpha"), _interval(agreement["alpha"], 1)))
    tiles.append((_percent(gold["value"]), translate("quality.gold"), _interval(gold)))
    done = outlook["done_at"]
    remark = translate("quality.wanted", count=f"{outlook['wanted']:,}")
    tiles.append(
        (done[5:16].replace("T", " ") if done and outlook["wanted"] else "–", translate("quality.done_at"), remark)
    )
    tiles.append((_money(outlook["spent"]), translate("quality.spent"), ""))
    return tiles


def _overall(agreement: Json, translate: Translator) -> Table:
    names = ("percent", "cohen", "fleiss", "alpha")
    rows: list[tuple[str, ...]] = [
        (translate(f"quality.{name}"), _value(name, agreement[name]), _interval(agreement[name], _scale(name)))
        for name in names
    ]
    return (translate("quality.measure"), translate("quality.value"), translate("quality.interval")), rows


def _by_class(classes: list[Json], translate: Translator) -> Table:
    columns = tuple(translate(f"quality.{name}") for name in ("class", "answers", "percent", "fleiss", "alpha"))
    rows: list[tuple[str, ...]] = [
        (
            row["label"],
            f"{row['answers']:,}",
            *(_with_interval(name, row[name]) for name in ("percent", "fleiss", "alpha")),
        )
        for row in classes
    ]
    return columns, rows


def _class_chart(classes: list[Json], translate: Translator) -> Chart | None:
    rows = [row for row in classes if row["percent"]["value"] is not None]
    worst = sorted(rows, key=lambda row: (row["percent"]["value"], row["label"]))[:_CLASSES]
    rates = [(row["label"], row["percent"]) for row in worst]
    return _intervals(rates, "quality.class", "quality.class_chart", translate)


def _by_pair(pairs: list[Json], translate: Translator) -> Table:
    columns = tuple(translate(f"quality.{name}") for name in ("pair", "items", "percent", "cohen", "alpha"))
    rows: list[tuple[str, ...]] = [
        (
            f"{row['first']} – {row['second']}",
            f"{row['percent']['n']:,}",
            *(_with_interval(name, row[name]) for name in ("percent", "cohen", "alpha")),
        )
        for row in pairs[:_PAIRS]
    ]
    return columns, rows


def _gold_chart(rates: Json, translate: Translator) -> Chart | None:
    measured = [(name, rate) for name, rate in rates.items() if rate["n"]]
    return _intervals(measured, "quality.person", "quality.gold_people", translate)


def _intervals(rows: list[tuple[str, Json]], first: str, title: str, translate: Translator) -> Chart | None:
    """Draws shares with their intervals.

    Args:
        first: Id of the name of the rows.
    """
    # A pair that shares few items has no interval: the value alone stands there.
    drawn = [
        Expectation(
            name, rate["value"], *(rate[end] if rate[end] is not None else rate["value"] for end in ("low", "high"))
        )
        for name, rate in rows
    ]
    columns = translate(first), translate("quality.value"), translate("quality.interval")
    return intervals(drawn, translate(title), columns, lambda value: f"{100 * value:.0f}%")


def _rates(rates: Json, translate: Translator, first: str) -> Table:
    rows: list[tuple[str, ...]] = [
        (name, _percent(rate["value"]), _interval(rate), f"{rate['n']:,}") for name, rate in rates.items()
    ]
    columns = (translate(first), translate("quality.gold"), translate("quality.interval"), translate("quality.items"))
    return columns, rows


def _people(report: Json, translate: Translator) -> Table:
    gold = report["gold"]["by_annotator"]
    posterior = (report["consensus"]["posterior"] or {}).get("accuracy", {})
    rows: list[tuple[str, ...]] = []
    for name, entry in report["annotators"].items():
        agreed = f"{_percent(entry['agreed'] / entry['compared'])}" if entry["compared"] else "–"
        rate = gold.get(name)
        rows.append(
            (
                name,
                f"{_percent(rate['value'])} ({rate['count']}/{rate['n']})" if rate else "–",
                _interval(rate) if rate else "–",
                f"{agreed} ({entry['compared']:,})",
                _percent(posterior.get(name)),
            )
        )
    keys = ("person", "gold", "interval", "consensus", "posterior")
    return tuple(translate(f"quality.{key}") for key in keys), rows


def _confusion_chart(annotators: Json, title: str) -> Chart | None:
    """Draws the most frequent deviations from the consensus of all together."""
    counts: dict[tuple[str, str], int] = {}
    for entry in annotators.values():
        for pair in entry["confusions"]:
            key = pair["right"], pair["answer"]
            counts[key] = counts.get(key, 0) + pair["count"]
    rows: list[str] = []
    columns: list[str] = []
    for right, answer in sorted(counts, key=lambda pair: (-counts[pair], pair)):
        if len({*rows, right}) <= _CONFUSED and len({*columns, answer}) <= _CONFUSED:
            rows += [right] if right not in rows else []
            columns += [answer] if answer not in columns else []
    columns.sort(key=lambda column: rows.index(column) if column in rows else len(rows))
    return heat_map(counts, rows, columns, title)


def _confusions(annotators: Json, translate: Translator) -> list[tuple[str, Table]]:
    columns = tuple(translate(f"quality.{key}") for key in ("consensus_label", "given", "times"))
    return [
        (
            name,
            (
                columns,
                [(pair["right"], pair["answer"], f"{pair['count']:,}") for pair in entry["confusions"][:_CONFUSED]],
            ),
        )
        for name, entry in annotators.items()
        if entry["confusions"]
    ]


def _work(work: list[Json], translate: Translator) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            part["annotator"],
            part["kind"],
            f"{part['labels']:,}",
            "–" if part["median_seconds"] is None else f"{part['median_seconds']:.1f} s",
            f"{part['seconds'] / 3600:.2f} h" if part["timed"] else "–",
            _money(part["cost"]),
            _money(part["cost"] / part["labels"]) if part["labels"] else "–",
        )
        for part in work
    ]
    keys = ("person", "kind", "answers", "median", "hours", "cost", "cost_label")
    return tuple(translate(f"quality.{key}") for key in keys), rows


def _time_chart(work: list[Json], title: str) -> Chart | None:
    rows = [
        (f"{part['annotator']} ({part['kind']})", part["median_seconds"], f"{part['median_seconds']:.1f} s")
        for part in work
        if part["median_seconds"] is not None
    ]
    return bars(rows[:_CLASSES], title)


def _drift_chart(errors: Mapping[str, list[float]], translate: Translator) -> Chart | None:
    """Draws each annotator's share of errors among the latest known items."""
    # Those with the most errors now: more curves could not be told apart.
    worst = sorted(errors.items(), key=lambda entry: -entry[1][-1])[:_CHARTS]
    runs = [
        (name, np.arange(1, len(values) + 1, dtype=np.float64), np.asarray(values, np.float64))
        for name, values in worst
    ]
    style = CurveStyle(lambda value: f"{100 * value:.0f}%", mean=False, unit=(100, "%"))
    chart = compared_curves(runs, translate("quality.drift_chart"), style, axis=translate("quality.known_item"))
    return chart and replace(chart, columns=tuple(map(translate.line, chart.columns)))


def _suggestions(suggestions: Json, translate: Translator) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{_percent(rates['planted']['value'])} ({rates['planted']['count']}/{rates['planted']['n']})",
            _interval(rates["planted"]),
            f"{_percent(rates['others']['value'])} ({rates['others']['count']}/{rates['others']['n']})",
        )
        for name, rates in suggestions.items()
    ]
    keys = ("person", "planted", "interval", "accepted")
    return tuple(translate(f"quality.{key}") for key in keys), rows


def _scale(name: str) -> int:
    return 100 if name == "percent" else 1


def _value(name: str, estimate: Json) -> str:
    return _percent(estimate["value"]) if name == "percent" else _number(estimate["value"])


def _with_interval(name: str, estimate: Json) -> str:
    interval = _interval(estimate, _scale(name))
    return _value(name, estimate) + (f" ({interval})" if interval not in ("", "–") else "")


def _interval(estimate: Json, scale: int = 100) -> str:
    low, high = estimate["low"], estimate["high"]
    if low is None or high is None:
        return "–"
    return f"{scale * low:.0f}–{scale * high:.0f}%" if scale == 100 else f"{low:.2f} … {high:.2f}"


def _percent(share: float | None) -> str:
    return "–" if share is None or math.isnan(share) else f"{100 * share:.1f}%"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _money(value: float | None) -> str:
    return "–" if value is None else number_text(round(value, 2))
