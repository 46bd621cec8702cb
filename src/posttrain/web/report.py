"""The report: one HTML page that holds everything it shows and loads nothing."""

from pathlib import Path

from posttrain.web import figures, wording
from posttrain.web.charts import DECISIONS
from posttrain.web.figures import learning_curve_svg
from posttrain.web.page import Tile, now_text, render_page, write_page
from posttrain.web.report_data import Report
from posttrain.web.selection_figures import selections_shown
from posttrain.web.training_data import Training
from posttrain.web.training_figures import shown
from posttrain.web.widths import at_both_widths

__all__ = ["Report", "learning_curve_svg", "render", "render_training", "write", "write_training"]

_TRAININGS = 20
"""The latest are drawn; what came before is counted."""


def render(report: Report) -> str:
    """The page as HTML."""
    charts = {
        "learning_curve": figures.learning_curve,
        "label_counts": figures.label_counts,
        "recall": figures.recall,
        "confusion": figures.confusion,
        "time": figures.time_by_stage,
        "lineage": figures.lineage_diagram,
    }
    latest = report.trainings[-_TRAININGS:]
    return render_page(
        "report.html",
        report=report,
        charts={name: at_both_widths(draw, report) for name, draw in charts.items()},
        funnels=list(figures.funnels(report)),
        final=[(wording.metric_name(name), wording.metric_text(name, value)) for name, value in report.final.items()],
        timings=[(wording.reason_text(name), wording.duration_text(value)) for name, value in report.timings.items()],
        headline=_headline(report),
        selections=selections_shown(report.selections),
        trainings=[shown(one, len(latest)) for one in latest],
        undrawn=len(report.trainings) - len(latest),
        levels_of_bars=figures.levels_of_bars(report),
        metric_text=wording.metric_text,
        gain_text=wording.gain_text,
        decisions=DECISIONS,
        metrics=_metrics_of_rounds(report),
    )


def write(report: Report, path: Path) -> None:
    """Write the page to ``path``, whose folder exists: whole or not at all.

    Raises:
        UserError: the disk refused.
    """
    write_page(path, render(report))


def render_training(training: Training, sentence: str = "", created: str = "") -> str:
    """The page of one training as HTML.

    Args:
        sentence: what was trained on what.
        created: when the page was made, in the caller's words.
    """
    return render_page("training_page.html", one=shown(training), sentence=sentence, created=created)


def write_training(training: Training, path: Path) -> None:
    """Write the page of one training to ``path``: whole or not at all.

    Raises:
        UserError: the disk refused.
    """
    told = training.settings
    sentence = f"{told['model']} on {told['data']}" if {"model", "data"} <= told.keys() else ""
    write_page(path, render_training(training, sentence, now_text()))


def _headline(report: Report) -> list[Tile]:
    rounds = figures.evaluated(report)
    tiles = []
    if report.champion and report.metric in report.champion.metrics:
        now = report.champion.metrics[report.metric]
        name = wording.metric_name(report.metric)
        told = wording.metric_text(report.metric, now)
        tiles.append((told, name, f"since round {report.champion.round}"))
        if rounds and wording.is_share(report.metric, now):
            first = rounds[0].metrics[report.metric]
            start, gain = wording.metric_text(report.metric, first), wording.points_text(now - first)
            tiles.append((gain, "points gained", f"since {start}"))
    labels = sum(row.labels_new for row in report.rounds)
    paid = sum(row.labels_new > 0 for row in report.rounds)
    tiles.append((f"{labels:,}", "labels", f"in {paid} round{'' if paid == 1 else 's'}"))
    deployed = sum(row.decision == "deploy" for row in report.rounds)
    refused = sum(row.decision == "refuse" for row in report.rounds)
    tiles.append((f"{deployed}", "models deployed", f"and {refused} refused"))
    spent = sum(sum(row.seconds.values()) for row in report.rounds)
    tiles.append((wording.duration_text(spent), "time", "all stages together"))
    return tiles


def _metrics_of_rounds(report: Report) -> list[str]:
    """The metrics that the table of rounds has columns for: the main one and up to three more."""
    names = dict.fromkeys(name for row in report.rounds for name in row.metrics)
    preferred = [name for name in ("macro_f1", "invalid_rate", "latency_p50", "latency_p99") if name in names]
    others = [name for name in names if name not in (report.metric, *preferred) and "." not in name]
    return [report.metric, *preferred, *others][:4] if names else []
