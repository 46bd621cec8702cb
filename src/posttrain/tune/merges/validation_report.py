"""The section of the merge page about what the merged model kept: by task, of the base, and beyond its models."""

import math

from posttrain.evaluate.bootstrap import RatioInterval
from posttrain.report.charts.bars import bars
from posttrain.report.charts.chart import Chart
from posttrain.report.formatting import metric_name
from posttrain.report.section import Block, Pairs, Section, Table, Text, blocks
from posttrain.tune.merges.validation import MERGED, SuiteValidation, Validation

_GAINS = (
    "Above 0 with its whole interval, the merge can do what none of its models can: on a suite that several were "
    "trained for, their skills combine. The best model is chosen on the same records, which is to the merge's "
    "disadvantage."
)


def validation_section(validation: Validation) -> Section:
    """Shows what the merged model kept on suites that a model was trained for, and on others relative to the base."""
    suites = validation.suites
    tasks = {name: suite for name, suite in suites.items() if suite.specialists}
    others = {name: suite for name, suite in suites.items() if not suite.specialists}
    caption = (
        f"What the merged model kept, on the same records as all others, in {validation.precision}. A suite that a "
        "model was trained for compares the merged model with that specialist; any other compares it with the base, "
        "which tells what capability was preserved. Intervals are paired bootstraps."
    )
    chart = _chart(validation)
    return Section(
        "Validation",
        blocks(
            Text(caption, "caption"),
            Pairs(_headline(validation)),
            (Text("Share of the score that was kept", "heading"), chart) if chart else None,
            _titled(_kept("Retention by task", tasks, "specialist")),
            _titled(_kept("Capability preserved", others, "of")),
            _titled(_gains(validation), _GAINS),
        ),
    )


def _titled(table: Table, note: str = "") -> list[Block]:
    return blocks(Text(table.name, "heading"), Text(note, "note"), table) if table.rows else []


def _headline(validation: Validation) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, kept in (("specialists", validation.average_retention), ("base", validation.preservation)):
        if kept:
            pairs.append((f"kept of the {name}", f"{_share(kept.ratio)} ({_interval(kept)})"))
    emerged = [name for name, suite in validation.suites.items() if suite.emerged]
    pairs.append(("better than every model", ", ".join(emerged) or "on no suite"))
    return pairs


def _chart(validation: Validation) -> Chart | None:
    kept = {name: suite.retention for name, suite in validation.suites.items() if suite.retention}
    finite = {name: value for name, value in kept.items() if math.isfinite(value.ratio)}
    rows = [(name, value.ratio, f"{_share(value.ratio)} ({_interval(value)})") for name, value in finite.items()]
    most = max((value.ratio for value in finite.values()), default=1.0)
    return bars(rows, "Share of the score that the merge kept", full=max(1.0, most), columns=("suite", "kept"))


def _kept(title: str, suites: dict[str, SuiteValidation], reference: str) -> Table:
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
    columns = ("suite", "metric", "records", reference, "its score", "merged", "kept", "95% interval")
    return Table(columns, rows, name=title)


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
    columns = ("suite", "trained for it", "best model", "merged", "gain", "95% interval", "better than all")
    return Table(columns, rows, name="Gain over the best single model")


def _share(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else "infinite"


def _interval(value: RatioInterval) -> str:
    return f"{_share(value.low)} to {_share(value.high)}"


def _score(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
