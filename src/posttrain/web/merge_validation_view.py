"""The section of the merge page about what the merged model kept: by task, of the base, and beyond its models."""

import math
from dataclasses import dataclass

from posttrain.evaluate.bootstrap import RatioInterval
from posttrain.evaluate.latency import PERCENTILES
from posttrain.report.charts.bars import bars
from posttrain.report.charts.chart import Chart
from posttrain.report.formatting import metric_name
from posttrain.tune.merges.validation import MERGED, SuiteValidation, Validation
from posttrain.web.page import Table


@dataclass(frozen=True)
class ValidationView:
    """The tables and the chart of the section; tables without rows are left out.

    Attributes:
        headline: names and numbers of all suites together.
        chart: what was kept on each suite.
        tasks: suites that a model was trained for.
        others: suites that none was trained for, relative to the base.
        gains: merged minus best single model on every suite.
        latency: seconds of single requests.
        precision: that all models were measured in.
    """

    headline: tuple[tuple[str, str], ...]
    chart: Chart | None
    tasks: Table
    others: Table
    gains: Table
    latency: Table
    precision: str


def validation_view(validation: Validation) -> ValidationView:
    """Returns what the page shows of a validation."""
    suites = validation.suites
    tasks = {name: suite for name, suite in suites.items() if suite.specialists}
    others = {name: suite for name, suite in suites.items() if not suite.specialists}
    return ValidationView(
        headline=_headline(validation),
        chart=_chart(validation),
        tasks=_kept(tasks, "specialist"),
        others=_kept(others, "of"),
        gains=_gains(validation),
        latency=_latency(validation),
        precision=validation.precision,
    )


def _headline(validation: Validation) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for name, kept in (("specialists", validation.average_retention), ("base", validation.preservation)):
        if kept:
            pairs.append((f"kept of the {name}", f"{_share(kept.ratio)} ({_interval(kept)})"))
    emerged = [name for name, suite in validation.suites.items() if suite.emerged]
    pairs.append(("better than every model", ", ".join(emerged) or "on no suite"))
    if latency := validation.latency:
        times = ", ".join(f"{name} {1000 * values['latency_p50']:.1f} ms" for name, values in latency.items())
        pairs.append(("median latency", times))
    return tuple(pairs)


def _chart(validation: Validation) -> Chart | None:
    kept = {name: suite.retention for name, suite in validation.suites.items() if suite.retention}
    finite = {name: value for name, value in kept.items() if math.isfinite(value.ratio)}
    rows = [(name, value.ratio, f"{_share(value.ratio)} ({_interval(value)})") for name, value in finite.items()]
    most = max((value.ratio for value in finite.values()), default=1.0)
    return bars(rows, "Share of the score that the merge kept", full=max(1.0, most), columns=("suite", "kept"))


def _kept(suites: dict[str, SuiteValidation], reference: str) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, suite in suites.items():
        model, kept = suite.retention_of, suite.retention
        rows.append(
            (
                name,
                metric_name(suite.metric),
                f"{suite.records:,}",
                model or "–",
                _score(suite.scores[model]) if model else "–",
                _score(suite.scores[MERGED]),
                _share(kept.ratio) if kept else "–",
                _interval(kept) if kept else "–",
            )
        )
    return ("suite", "metric", "records", reference, "its score", "merged", "kept", "95% interval"), rows


def _gains(validation: Validation) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, suite in validation.suites.items():
        gain = suite.over_best
        rows.append(
            (
                name,
                ", ".join(suite.specialists) or "none",
                f"{suite.best} {_score(suite.scores[suite.best])}",
                _score(suite.scores[MERGED]),
                _signed(gain.difference),
                f"{_signed(gain.low)} to {_signed(gain.high)}",
                "yes" if suite.emerged else "no",
            )
        )
    return ("suite", "trained for it", "best model", "merged", "gain", "95% interval", "better than all"), rows


def _latency(validation: Validation) -> Table:
    rows: list[tuple[str, ...]] = [
        (name, *(f"{1000 * values[each]:.1f} ms" for each in PERCENTILES), f"{values['n']:g}")
        for name, values in (validation.latency or {}).items()
    ]
    return ("model", *map(metric_name, PERCENTILES), "prompts"), rows


def _share(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else "infinite"


def _interval(value: RatioInterval) -> str:
    return f"{_share(value.low)} to {_share(value.high)}"


def _score(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
