"""Renders the report: one HTML page about a workspace or about one training, which loads nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.report import formatting
from posttrain.report.charts.bars import bars, count_rows, funnel_charts, stacked_bars
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.curve import CurveStyle, compared_curves
from posttrain.report.charts.heat_map import heat_map
from posttrain.report.charts.lineage import lineage
from posttrain.report.charts.rounds import DECISION_NAMES, CurvePoint, learning_curve_chart
from posttrain.report.formatting import is_share, level_text, metric_name, reason_text
from posttrain.tune.importance import measure_importance
from posttrain.tune.transfer.past import PastStudy
from posttrain.web.page import PAGE_BYTES, Tile, now_text, render_page, write_page
from posttrain.web.report_data import GainRow, Report, RoundRow, gain_text
from posttrain.web.selection_view import selections_view
from posttrain.web.study_report import summarize
from posttrain.web.study_view import study_view
from posttrain.web.training_reader import TrainingCurves
from posttrain.web.training_view import training_view

__all__ = ["Report", "render_report", "render_training", "write_report", "write_training"]

_TRAININGS = 20
"""Number of trainings drawn, the latest; earlier ones are only counted."""

_SEARCHES = 3
"""Searches of settings that are drawn, the latest."""

_CLASSES = 20
"""Number of classes whose recall is drawn, the worst."""

_CONFUSED_ROWS, _CONFUSED_COLUMNS = 8, 8
"""Size of the map of confusions; more cells could not be read on a page."""


def render_report(report: Report) -> str:
    """Renders the report as HTML of less than 2 MB, as far as fewer points and rows of a table can make it so."""
    page = ""
    for detail in (1.0, 0.5, 0.25, 0.1):
        page = _render(report, detail)
        if len(page.encode("utf-8", "replace")) < PAGE_BYTES:
            break
    return page


def _render(report: Report, detail: float) -> str:
    charts = {
        "learning_curve": learning_curve,
        "label_counts": label_counts,
        "drift": drift_by_round,
        "recall": recall,
        "confusion": confusion,
        "time": time_by_stage,
        "lineage": lineage_diagram,
    }
    latest = report.trainings[-_TRAININGS:]
    return render_page(
        "report.html",
        styles=("selection.css",),
        report=report,
        charts={name: draw(report) for name, draw in charts.items()},
        funnels=list(funnels(report)),
        final=[
            (formatting.metric_name(name), formatting.metric_text(name, value)) for name, value in report.final.items()
        ],
        timings=[
            (formatting.reason_text(name), formatting.duration_text(value)) for name, value in report.timings.items()
        ],
        headline=_headline_tiles(report),
        selections=selections_view(report.selections, detail),
        trainings=[training_view(training, len(latest) / detail) for training in latest],
        undrawn=len(report.trainings) - len(latest),
        searches=[_search_view(search, detail) for search in report.searches[-_SEARCHES:]],
        unshown=max(0, len(report.searches) - _SEARCHES),
        levels_of_bars=interval_levels(report),
        metric_text=formatting.metric_text,
        gain_text=gain_text,
        decisions=DECISION_NAMES,
        metrics=table_metrics(report),
    )


def _search_view(search: PastStudy, detail: float) -> dict[str, Any]:
    """Returns what the template shows of a round's search."""
    goal, trials = search.goal, search.trials
    importance = measure_importance(goal.space, trials, maximize=goal.maximize)
    return {
        "name": search.name,
        "count": len(trials),
        "sentence": summarize(goal, trials, importance),
        "view": study_view(goal, trials, (), importance, detail / _SEARCHES),
    }


def write_report(report: Report, path: Path) -> None:
    """Writes the report atomically to ``path``, whose folder exists.

    Raises:
        UserError: the disk refused.
    """
    write_page(path, render_report(report))


def render_training(training: TrainingCurves, sentence: str = "", created: str = "") -> str:
    """Renders the page of one training as HTML.

    Args:
        sentence: names the model and its data.
        created: time of creation, as text.
    """
    return render_page("training_page.html", view=training_view(training), sentence=sentence, created=created)


def write_training(training: TrainingCurves, path: Path) -> None:
    """Writes the page of one training atomically to ``path``.

    Raises:
        UserError: the disk refused.
    """
    settings = training.settings
    sentence = f"{settings['model']} on {settings['data']}" if {"model", "data"} <= settings.keys() else ""
    write_page(path, render_training(training, sentence, now_text()))


def _headline_tiles(report: Report) -> list[Tile]:
    rounds = evaluated_rounds(report)
    tiles = []
    if report.champion and report.metric in report.champion.metrics:
        now = report.champion.metrics[report.metric]
        name = formatting.metric_name(report.metric)
        value = formatting.metric_text(report.metric, now)
        tiles.append((value, name, f"of the model of round {report.champion.round}"))
        # A gain in points means something for shares alone: a perplexity falls.
        if rounds and formatting.is_share(report.metric, now):
            first = rounds[0].metrics[report.metric]
            start, gain = formatting.metric_text(report.metric, first), formatting.points_text(now - first)
            tiles.append((gain, "points gained", f"since {start}"))
    done, counts = report.rounds_done, report.batches
    asked = f"of {counts.asked:,} asked, in {done} round{'' if done == 1 else 's'}"
    tiles.append((f"{counts.learned:,}", "labels learned", asked))
    deployed, refused, back = (
        sum(row.decision == action for row in report.rounds) for action in ("deploy", "refuse", "rollback")
    )
    remark = f"and {refused} refused" + (f", {back} rolled back" if back else "")
    tiles.append((f"{deployed}", "models deployed", remark))
    spent = sum(sum(row.seconds.values()) for row in report.rounds)
    tiles.append((formatting.duration_text(spent), "time", "all stages together"))
    return tiles


def table_metrics(report: Report) -> list[str]:
    """Returns the metrics in the table of rounds: the main one and up to three more."""
    names = dict.fromkeys(name for row in report.rounds for name in row.metrics)
    preferred = [name for name in ("macro_f1", "invalid_rate", "latency_p50", "latency_p99") if name in names]
    others = [name for name in names if name not in (report.metric, *preferred) and "." not in name]
    return [report.metric, *preferred, *others][:4] if names else []


def learning_curve(report: Report) -> Chart | None:
    """Draws the learning curve; None while no round is evaluated."""
    rounds = evaluated_rounds(report)
    values = {row.number: row.metrics[report.metric] for row in rounds}
    # Both curves must be in the same metric, which may differ after the main suite changes.
    compared = report.baseline if report.baseline and report.baseline.metric == report.metric else None
    random_values = {point.round: point.value for point in compared.random} if compared else {}
    points = [
        CurvePoint(
            name=f"round {row.number}",
            detail=f"{row.labels:,} labels",
            value=values[row.number],
            champions=row.champions,
            decision=row.decision or "open",
            gain=gain_text(row.interval) if row.interval else "",
            bar=_gain_bar(report, row),
            random_baseline=random_values.get(row.number),
        )
        for row in rounds
    ]
    percent = all(is_share(report.metric, value) for value in values.values())
    title = f"{metric_name(report.metric)} of each round's candidate and of the champion"
    measure = metric_name(report.metric)
    return learning_curve_chart(points, title, measure=measure, percent=percent)


def _gain_bar(report: Report, row: RoundRow) -> tuple[float, float] | None:
    """Returns the gain's interval laid onto the champion's value; None if it has another metric's unit."""
    gain = _main_gain(report, row)
    if gain is None:
        return None
    # By the paired difference, which is over the same records for both models.
    champion = row.metrics[report.metric] - gain.difference
    return champion + gain.low, champion + gain.high


def _main_gain(report: Report, row: RoundRow) -> GainRow | None:
    return row.interval if row.interval and row.interval.metric == report.metric else None


def interval_levels(report: Report) -> str:
    """Returns the coverage of the learning curve's bars, such as ``95%`` or ``90% or 95%``; "" without bars."""
    gains = [_main_gain(report, row) for row in evaluated_rounds(report)]
    return " or ".join(level_text(level) for level in sorted({gain.level for gain in gains if gain}))


def evaluated_rounds(report: Report) -> list[RoundRow]:
    """Returns the rounds that have the main metric."""
    return [row for row in report.rounds if report.metric in row.metrics]


def drift_by_round(report: Report) -> Chart | None:
    """Draws the drift of new inputs, and of the champion's confidence on them, by round; None if none was measured."""
    drifts = {row.number: row.drift for row in report.rounds if row.drift}
    numbers = np.array(list(drifts), np.float64)
    curves = [
        # None, where nothing was measured, becomes NaN.
        (name, numbers, np.array([fields[key] for fields in drifts.values()], np.float64))
        for key, name in (("psi", "inputs"), ("confidence", "confidence"))
    ]
    return compared_curves(curves, "stability index", CurveStyle(formatting.number_text, mean=False), axis="round")


def label_counts(report: Report) -> Chart | None:
    # By name where counts are equal: the same workspace gives the same page.
    counts = sorted(report.label_counts.items(), key=lambda item: (-item[1], item[0]))
    return bars(count_rows(counts), "labels a class", columns=("class", "labels"))


def recall(report: Report) -> Chart | None:
    # Of equal recalls the class with more records, which costs more mistakes; then by name, so that pages are the same.
    worst = sorted(report.per_class, key=lambda row: (row.recall, -row.n, row.label))[:_CLASSES]
    rows = [(row.label, row.recall, f"{100 * row.recall:.0f}% of {row.n}") for row in worst]
    title = "recall of each class, the worst first"
    return bars(rows, title, full=1.0, colour="$green", columns=("class", "recall"))


def confusion(report: Report) -> Chart | None:
    """Draws the most frequent confusions: adds rows and columns until the map is full."""
    pairs = [pair for pair in report.confusion if pair.expected != pair.predicted and pair.count]
    rows: list[str] = []
    columns: list[str] = []
    for pair in sorted(pairs, key=lambda pair: (-pair.count, pair.expected, pair.predicted)):
        new_row, new_column = pair.expected not in rows, pair.predicted not in columns
        if len(rows) + new_row <= _CONFUSED_ROWS and len(columns) + new_column <= _CONFUSED_COLUMNS:
            rows += [pair.expected] if new_row else []
            columns += [pair.predicted] if new_column else []
    counts = {(pair.expected, pair.predicted): pair.count for pair in report.confusion}
    # The pairs hold only mistakes: the correct answers follow from the recall.
    counts |= {(row.label, row.label): round(row.recall * row.n) for row in report.per_class}
    # Columns in the order of the rows, so that correct answers form the diagonal.
    columns.sort(key=lambda column: rows.index(column) if column in rows else len(rows))
    return heat_map(counts, rows, columns, "expected answers (rows) by given answers (columns)")


def funnels(report: Report) -> Iterator[tuple[str, Chart]]:
    """Yields each set's name and funnel."""
    rows = [row for row in report.funnel if row.step != "kept"]
    return funnel_charts(
        [(row.set, None if row.step == "in" else reason_text(row.reason or row.step), row.count) for row in rows]
    )


def time_by_stage(report: Report) -> Chart | None:
    # The round with most stages fixes their order; round 0 has only a few of them.
    fullest_first = sorted(report.rounds, key=lambda row: -len(row.seconds))
    stages = list(dict.fromkeys(stage for row in fullest_first for stage in row.seconds))
    rows = [(f"round {row.number}", row.seconds) for row in report.rounds]
    return stacked_bars([row for row in rows if row[1]], stages, "time by stage in each round")


def lineage_diagram(report: Report) -> Chart | None:
    title = "files, dataset versions, models and deployments, joined to what they were made from"
    return lineage(report.lineage_nodes, report.lineage_edges, title)
