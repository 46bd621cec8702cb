"""The report's charts: each picks what it needs out of the report."""

from collections.abc import Iterator

from markupsafe import Markup

from posttrain.web.charts import (
    CurvePoint,
    bars,
    count_rows,
    heat_map,
    line_chart,
    lineage,
    stacked_bars,
    standalone,
)
from posttrain.web.funnels import funnel_charts
from posttrain.web.report_data import Interval, Report, RoundRow
from posttrain.web.widths import WIDE
from posttrain.web.wording import gain_text, is_share, level_text, metric_name, reason_text

_CLASSES = 20
_CONFUSED_ROWS, _CONFUSED_COLUMNS = 8, 8


def learning_curve_svg(report: Report) -> str:
    """The learning curve as an SVG file of its own; empty while no round is evaluated."""
    chart = learning_curve(report, WIDE)
    return standalone(chart) if chart else ""


def learning_curve(report: Report, width: int) -> str:
    rounds = evaluated(report)
    values = {row.number: row.metrics[report.metric] for row in rounds}
    compared = report.baseline if report.baseline and report.baseline.metric == report.metric else None
    drawn = {one.round: one.value for one in compared.random} if compared else {}
    points = [
        CurvePoint(
            name=f"round {row.number}" if width >= 500 else f"r{row.number}",
            detail=f"{row.labels_total:,} labels" if width >= 500 else f"{row.labels_total:,}",
            value=values[row.number],
            champions=row.champions,
            decision=row.decision or "open",
            gain=gain_text(row.interval) if row.interval else "",
            bar=_bar(report, row),
            beside=drawn.get(row.number),
        )
        for row in rounds
    ]
    percent = all(is_share(report.metric, value) for value in values.values())
    title = f"{metric_name(report.metric)} of each round's candidate and of the champion"
    measure = metric_name(report.metric)
    return line_chart(points, title, measure=measure, percent=percent, width=width)


def _bar(report: Report, row: RoundRow) -> tuple[float, float] | None:
    """The interval of the gain, laid onto the champion's value; None where it is in another metric's unit."""
    gain = _drawn_gain(report, row)
    if gain is None:
        return None
    champion = row.metrics[report.metric] - gain.difference
    return champion + gain.low, champion + gain.high


def _drawn_gain(report: Report, row: RoundRow) -> Interval | None:
    return row.interval if row.interval and row.interval.metric == report.metric else None


def levels_of_bars(report: Report) -> str:
    """The coverage of the learning curve's bars, such as ``95%`` or ``90% or 95%``; empty without bars."""
    gains = [_drawn_gain(report, row) for row in evaluated(report)]
    return " or ".join(level_text(level) for level in sorted({gain.level for gain in gains if gain}))


def evaluated(report: Report) -> list[RoundRow]:
    """The rounds that have the main metric."""
    return [row for row in report.rounds if report.metric in row.metrics]


def label_counts(report: Report, width: int) -> str:
    counts = sorted(report.label_counts.items(), key=lambda item: (-item[1], item[0]))
    return bars(count_rows(counts), "labels a class", width=width)


def recall(report: Report, width: int) -> str:
    worst = sorted(report.per_class, key=lambda row: (row.recall, -row.n, row.label))[:_CLASSES]
    rows = [(row.label, row.recall, f"{100 * row.recall:.0f}% of {row.n}") for row in worst]
    return bars(rows, "recall of each class, the worst first", width=width, full=1.0, kind="b")


def confusion(report: Report, width: int) -> str:
    """The most frequent confusions: rows and columns are taken in until the map is full."""
    pairs = [pair for pair in report.confusion if pair.expected != pair.predicted and pair.count]
    rows: list[str] = []
    columns: list[str] = []
    limit = _CONFUSED_COLUMNS if width >= 500 else 5
    for pair in sorted(pairs, key=lambda pair: (-pair.count, pair.expected, pair.predicted)):
        new_row, new_column = pair.expected not in rows, pair.predicted not in columns
        if len(rows) + new_row <= _CONFUSED_ROWS and len(columns) + new_column <= limit:
            rows += [pair.expected] if new_row else []
            columns += [pair.predicted] if new_column else []
    counts = {(pair.expected, pair.predicted): pair.count for pair in report.confusion}
    counts |= {(row.label, row.label): round(row.recall * row.n) for row in report.per_class}
    columns.sort(key=lambda column: rows.index(column) if column in rows else len(rows))
    return heat_map(counts, rows, columns, "expected answers (rows) by given answers (columns)", width=width)


def funnels(report: Report) -> Iterator[tuple[str, Markup]]:
    """Each set's name and funnel."""
    rows = [row for row in report.funnel if row.step != "kept"]
    return funnel_charts(
        [(row.set, None if row.step == "in" else reason_text(row.reason or row.step), row.count) for row in rows]
    )


def time_by_stage(report: Report, width: int) -> str:
    fullest_first = sorted(report.rounds, key=lambda row: -len(row.seconds))
    stages = list(dict.fromkeys(stage for row in fullest_first for stage in row.seconds))
    rows = [(f"round {row.number}" if width >= 500 else f"r{row.number}", row.seconds) for row in report.rounds]
    return stacked_bars([row for row in rows if row[1]], stages, "time by stage in each round", width=width)


def lineage_diagram(report: Report, width: int) -> str:
    title = "files, dataset versions, models and deployments, joined to what they were made from"
    return lineage(report.lineage_nodes, report.lineage_edges, title, width=width)
