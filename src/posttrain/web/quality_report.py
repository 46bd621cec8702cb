"""The quality report of the labelling: agreement, gold items, time, drift, and alarms."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from posttrain.report.charts.bars import bars
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.curve import CurveStyle, compared_curves
from posttrain.report.charts.heat_map import heat_map
from posttrain.report.charts.rounds import Expectation, intervals
from posttrain.report.section import Fold, Items, Section, Table, Text, Tile, blocks
from posttrain.store.message import Message

_CLASSES = 40
_PAIRS = 50
_CONFUSED = 10
_CHARTS = 8

_ANSWERS, _CLASS, _PERSON = Message("answers"), Message("class"), Message("person")
_INTERVAL, _VALUE, _ITEMS = Message("95% interval"), Message("value"), Message("items")
_GOLD = Message("Gold accuracy")

_MEASURES = {
    "percent": Message("Equal answers"),
    "cohen": Message("Cohen's kappa"),
    "fleiss": Message("Fleiss' kappa"),
    "alpha": Message("Krippendorff's alpha"),
}

_FINDINGS = {
    "suggestion_bias": Message("Accepts suggestions unread."),
    "position_bias": Message("Prefers a place."),
    "speed": Message("Too fast to have read."),
    "one_answer": Message("Mostly one answer."),
    "random_answers": Message("Answers at random."),
    "new_errors": Message("More errors than before."),
}

Json = Mapping[str, Any]

_section: Callable[..., Section] = partial(Section.of, empty=Message("Nothing to measure yet."))


def quality_tiles(report: Json) -> list[Tile]:
    """Returns the headline numbers of a report of `posttrain.label.quality.queue_report.QueueReports`."""
    counts, outlook = report["counts"], report["outlook"]
    agreement, gold = report["agreement"], report["gold"]
    done = outlook["done_at"]
    of_people = Message("{annotators} people, {items} items; {of_models} of models", **counts)
    wanted = Message("{count} answers still wanted", count=f"{outlook['wanted']:,}")
    at = done[5:16].replace("T", " ") if done and outlook["wanted"] else "–"
    return [
        (f"{counts['answers']:,}", _ANSWERS, of_people),
        (_percent(agreement["percent"]["value"]), Message("Agreement"), _interval(agreement["percent"])),
        (_number(agreement["alpha"]["value"]), _MEASURES["alpha"], _interval(agreement["alpha"], 1)),
        (_percent(gold["value"]), _GOLD, _interval(gold)),
        (at, Message("done about (UTC)"), wanted),
    ]


def quality_sections(report: Json, accepted: Sequence[Json] = ()) -> list[Section]:
    """Returns the sections of a report.

    Args:
        report: Report of `posttrain.label.quality.queue_report.QueueReports`.
        accepted: Rows of `posttrain.loop.label_reports.label_reports` with labels of models, the latest first.
    """
    behaviour = report["behaviour"]
    return [
        _alarms(report["alarms"]),
        *([_accepted(accepted)] if accepted else []),
        _agreement(report["agreement"]),
        _gold_section(report),
        _confusions(report["annotators"]),
        _section(Message("Time"), "", _time_chart(report["work"]), _work(report["work"])),
        _section(
            Message("Drift"),
            Message("Errors among the latest 30 gold and checked items."),
            _drift_chart(behaviour["errors"]),
        ),
        _section(
            Message("Suggestions"),
            Message("How often suggestions are accepted; planted ones are wrong on purpose."),
            _suggestions(behaviour["suggestions"]),
        ),
    ]


def _alarms(alarms: Sequence[Json]) -> Section:
    rows = [
        (
            _FINDINGS.get(alarm["kind"]) or alarm["kind"],
            Message(
                "{sentence} (n = {n}, p = {p:.2g})", sentence=alarm["sentence"], n=alarm["evidence"], p=alarm["p_value"]
            ),
        )
        for alarm in alarms
    ]
    caption = Message("Faults that chance explains badly; an honest team rarely raises one.")
    shown = Items(rows) if rows else Text(Message("No alarm."))
    return Section(Message("Alarms"), [Text(caption, "caption"), shown])


def _accepted(rounds: Sequence[Json]) -> Section:
    rows = []
    for row in rounds:
        part = row["models"]
        threshold = (part["acceptance"] or {}).get("threshold")
        rows.append(
            (
                str(row["round"]),
                part["teacher"],
                f"{part['accepted']}",
                "–" if threshold is None else f"{threshold:.4g}",
                f"{part['checked']}",
                _percent(part["error"]),
                f"{100 * part['low']:.1f}–{100 * part['high']:.1f}%" if part["checked"] else "–",
            )
        )
    title = Message("Accepted without people")
    columns = (Message("round"), Message("model"), Message("accepted"), Message("from confidence"), Message("checked"))
    caption = Message("What a model labelled by itself, and the error of what people checked of it.")
    return _section(title, caption, Table((*columns, Message("error"), _INTERVAL), rows, name=title))


def _agreement(agreement: Json) -> Section:
    title = Message("Agreement")
    overall = [
        (title, _value(name, agreement[name]), _interval(agreement[name], _scale(name)))
        for name, title in _MEASURES.items()
    ]
    by_class = [
        (
            row["label"],
            f"{row['answers']:,}",
            *(_with_interval(name, row[name]) for name in ("percent", "alpha")),
        )
        for row in agreement["by_class"]
    ]
    by_pair = [
        (
            f"{row['first']} – {row['second']}",
            f"{row['percent']['n']:,}",
            *(_with_interval(name, row[name]) for name in ("percent", "cohen")),
        )
        for row in agreement["by_pair"][:_PAIRS]
    ]
    measured = [row for row in agreement["by_class"] if row["percent"]["value"] is not None]
    worst = sorted(measured, key=lambda row: (row["percent"]["value"], row["label"]))[:_CLASSES]
    chart = _rates_chart(
        [(row["label"], row["percent"]) for row in worst], _CLASS, Message("agreement on each class, the worst first")
    )
    classes, pairs = Message("By class"), Message("By pair")
    class_columns = (_CLASS, _ANSWERS, *(_MEASURES[name] for name in ("percent", "alpha")))
    pair_columns = (Message("pair"), _ITEMS, *(_MEASURES[name] for name in ("percent", "cohen")))
    return Section(
        title,
        blocks(
            Text(Message("On {items} items with several answers.", items=f"{agreement['items']:,}"), "caption"),
            Table((Message("measure"), _VALUE, _INTERVAL), overall, name=title),
            (Text(classes, "heading"), chart, Table(class_columns, by_class, name=classes)) if by_class else None,
            (Text(pairs, "heading"), Table(pair_columns, by_pair, name=pairs)) if by_pair else None,
        ),
    )


def _gold_section(report: Json) -> Section:
    gold = report["gold"]
    measured = [(name, rate) for name, rate in gold["by_annotator"].items() if rate["n"]]
    chart = _rates_chart(measured, _PERSON, Message("gold accuracy of each person with its interval"))
    rows = [
        (name, _percent(rate["value"]), _interval(rate), f"{rate['n']:,}") for name, rate in gold["by_class"].items()
    ]
    classes = Message("By class")
    by_class = Table((_CLASS, _GOLD, _INTERVAL, _ITEMS), rows, name=classes)
    caption = Message("Items whose right answer is known, mixed in unseen; bars are 95% intervals.")
    return _section(_GOLD, caption, chart, _people(report), (Text(classes, "heading"), by_class) if rows else None)


def _rates_chart(rows: list[tuple[str, Json]], first: str, title: str) -> Chart | None:
    """Draws shares with their intervals."""
    # A pair that shares few items has no interval: the value alone stands there.
    drawn = [
        Expectation(
            name, rate["value"], *(rate[end] if rate[end] is not None else rate["value"] for end in ("low", "high"))
        )
        for name, rate in rows
    ]
    return intervals(drawn, title, (first, _VALUE, _INTERVAL), lambda value: f"{100 * value:.0f}%")


def _people(report: Json) -> Table:
    gold = report["gold"]["by_annotator"]
    posterior = (report["consensus"]["posterior"] or {}).get("accuracy", {})
    rows = []
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
    consensus = (Message("agrees with the consensus"), Message("accuracy by Dawid–Skene"))
    return Table((_PERSON, _GOLD, _INTERVAL, *consensus), rows, name=_GOLD)


def _confusions(annotators: Json) -> Section:
    """Draws the most frequent deviations from the consensus of all together, and lists those of each person."""
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
    names = (Message("consensus"), Message("given"), Message("times"))
    folds = [
        Fold(
            name,
            [
                Table(
                    names,
                    [(pair["right"], pair["answer"], f"{pair['count']:,}") for pair in entry["confusions"][:_CONFUSED]],
                    name=name,
                )
            ],
        )
        for name, entry in annotators.items()
        if entry["confusions"]
    ]
    caption = Message("Deviations from the consensus: rows are the consensus, columns the answers.")
    chart = heat_map(counts, rows, columns, Message("consensus (rows) by answers (columns)"))
    return _section(Message("Confusions"), caption, chart, folds)


def _work(work: list[Json]) -> Table:
    rows = [
        (
            part["annotator"],
            part["kind"],
            f"{part['labels']:,}",
            "–" if part["median_seconds"] is None else f"{part['median_seconds']:.1f} s",
            f"{part['seconds'] / 3600:.2f} h" if part["timed"] else "–",
        )
        for part in work
    ]
    columns = (_PERSON, Message("kind"), _ANSWERS, Message("median time"), Message("time"))
    return Table(columns, rows, name=Message("Time"))


def _time_chart(work: list[Json]) -> Chart | None:
    rows = [
        (f"{part['annotator']} ({part['kind']})", part["median_seconds"], f"{part['median_seconds']:.1f} s")
        for part in work
        if part["median_seconds"] is not None
    ]
    return bars(rows[:_CLASSES], Message("median seconds per answer"))


def _drift_chart(errors: Mapping[str, Sequence[float]]) -> Chart | None:
    """Draws each annotator's share of errors among the latest known items."""
    # Those with the most errors now: more curves could not be told apart.
    worst = sorted(errors.items(), key=lambda entry: -entry[1][-1])[:_CHARTS]
    runs = [
        (name, np.arange(1, len(values) + 1, dtype=np.float64), np.asarray(values, np.float64))
        for name, values in worst
    ]
    style = CurveStyle(lambda value: f"{100 * value:.0f}%", mean=False, unit=(100, "%"))
    return compared_curves(runs, Message("share of errors"), style, axis=Message("item whose answer is known"))


def _suggestions(suggestions: Json) -> Table:
    rows = [
        (
            name,
            f"{_percent(rates['planted']['value'])} ({rates['planted']['count']}/{rates['planted']['n']})",
            _interval(rates["planted"]),
            f"{_percent(rates['others']['value'])} ({rates['others']['count']}/{rates['others']['n']})",
        )
        for name, rates in suggestions.items()
    ]
    columns = (_PERSON, Message("planted ones accepted"), _INTERVAL, Message("others accepted"))
    return Table(columns, rows, name=Message("Suggestions"))


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
