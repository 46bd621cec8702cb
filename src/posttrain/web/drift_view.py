"""Charts and tables of the drift between two dataset versions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.data.report.drift import WORDS, Drift
from posttrain.data.report.drift_measures import (
    LARGE,
    MIN_DIVERGENCE,
    MODERATE,
    Divergence,
    MeanDiscrepancy,
    PopulationStability,
)
from posttrain.data.report.ngrams import NgramChange
from posttrain.report.charts.bars import bars, paired_bars
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.histogram import histogram
from posttrain.report.formatting import number_text, percent_text, reason_text, signed_text
from posttrain.web.page import Table

_NUMBERS, _CHANGED, _NGRAMS, _PERMUTATION_BINS = 20, 15, 15, 30
_NAMES = ("older version", "newer version")


@dataclass(frozen=True)
class DriftView:
    """The drift between two versions as charts, tables and sentences; empty fields are not shown.

    Args:
        stability: bars of the greatest indices, ``others`` how many are not drawn, and ``moved`` the bins of those
            that moved: name and chart.
        divergence: bars of every set of shares, and ``shares`` those of categories: name, sentence and chart.
        ngrams: what happened to runs of words, and a table of those.
        inputs: a sentence and a chart of the permutation test.
    """

    drift: Drift
    stability: Chart | None
    others: int
    moved: tuple[tuple[str, Chart | None], ...]
    divergence: Chart | None
    shares: tuple[tuple[str, str, Chart | None], ...]
    ngrams: tuple[tuple[str, Table], ...]
    inputs: tuple[str, Chart | None] | None


def drift_view(drift: Drift) -> DriftView:
    """Builds the charts, tables and sentences about a drift."""
    numbers = sorted(drift.numbers, key=lambda statistic: (-statistic.index, statistic.name))
    return DriftView(
        drift=drift,
        stability=_stability_bars(numbers),
        others=max(len(numbers) - _NUMBERS, 0),
        moved=tuple(
            (reason_text(statistic.name), _bin_bars(statistic))
            for statistic in numbers[:4]
            if statistic.index >= MODERATE
        ),
        divergence=_divergence_bars(drift.shares),
        shares=tuple(
            (statistic.name, _divergence_sentence(statistic), _share_bars(statistic))
            for statistic in drift.shares
            if statistic.name != WORDS
        ),
        ngrams=tuple(_ngrams(drift)),
        inputs=(_permutation_sentence(drift.inputs), _permutation_chart(drift.inputs)) if drift.inputs else None,
    )


def _stability_bars(numbers: Sequence[PopulationStability]) -> Chart | None:
    rows = [
        (reason_text(stability.name), stability.index, f"{stability.index:.3f} {stability.level}")
        for stability in numbers[:_NUMBERS]
    ]
    # At least twice the upper threshold, so that small drifts look small.
    most = max([2 * LARGE, *(stability.index for stability in numbers)])
    marks = ((MODERATE, f"{MODERATE:g}"), (LARGE, f"{LARGE:g}"))
    title = "population stability index of each number"
    return bars(rows, title, full=most, marks=marks, columns=("number", "index"))


def _bin_bars(stability: PopulationStability) -> Chart | None:
    ends = [number_text(edge) for edge in stability.edges]
    names = [f"to {ends[0]}", *(f"to {end}" for end in ends[1:]), f"above {ends[-1]}"]
    rows = [
        (name, before, after)
        for name, before, after in zip(names, stability.old, stability.new, strict=True)
        if before or after
    ]
    title = f"shares of records by {reason_text(stability.name)}, in the older version's tenths"
    return paired_bars(rows, title, percent_text, names=_NAMES)


def _divergence_bars(shares: Sequence[Divergence]) -> Chart | None:
    ordered = sorted(shares, key=lambda divergence: (-divergence.divergence, divergence.name))
    rows = [
        (
            reason_text(divergence.name),
            divergence.divergence,
            f"{divergence.divergence:.3f} {'shifted' if divergence.shifted else 'stable'}",
        )
        for divergence in ordered
    ]
    # At least a tenth of a bit wide, so that small divergences look small.
    full = max([0.1, *(divergence.divergence for divergence in ordered)])
    marks = ((MIN_DIVERGENCE, f"{MIN_DIVERGENCE:g}"),)
    title = "Jensen–Shannon divergence in bits"
    return bars(rows, title, full=full, colour="$green", marks=marks, columns=("", "divergence"))


def _divergence_sentence(divergence: Divergence) -> str:
    test = "" if divergence.p_value is None else f"; chi-square test p {p_text(divergence.p_value)}"
    return (
        f"Jensen–Shannon divergence {divergence.divergence:.3f} bits (distance {divergence.distance:.2f}), "
        f"by chance about {number_text(divergence.by_chance)}{test}"
    )


def _share_bars(divergence: Divergence) -> Chart | None:
    totals = sum(divergence.old.values()), sum(divergence.new.values())
    rows = [
        (name, divergence.old[name] / totals[0], divergence.new[name] / totals[1])
        for name in list(divergence.old)[:_CHANGED]
    ]
    title = f"shares of {reason_text(divergence.name)}, those that changed most first"
    return paired_bars(rows, title, percent_text, names=_NAMES)


def _ngrams(drift: Drift) -> Iterable[tuple[str, Table]]:
    for part, changes in drift.ngrams.items():
        kinds = (
            (f"New in the {part}", changes.appeared),
            (f"Vanished from the {part}", changes.vanished),
            (f"More common in the {part}", changes.more),
            (f"Less common in the {part}", changes.less),
        )
        for title, ngram_changes in kinds:
            if ngram_changes:
                head = ("words", "older", "newer", "ratio", "log-odds", "z")
                yield title, (head, [_ngram_row(change) for change in ngram_changes[:_NGRAMS]])


def _ngram_row(change: NgramChange) -> tuple[str, ...]:
    ratio = "new" if change.ratio is None else "gone" if not change.new else f"{change.ratio:.2g}×"
    return (
        change.ngram,
        f"{change.old:,}",
        f"{change.new:,}",
        ratio,
        signed_text(change.log_odds),
        signed_text(change.z),
    )


def p_text(p_value: float) -> str:
    """Formats a p-value with its sign: ``= 0.03``, ``< 0.0001``."""
    # "= 0" would claim a proof.
    return "< 0.0001" if p_value < 1e-4 else f"= {p_value:.2g}"


def _permutation_sentence(discrepancy: MeanDiscrepancy) -> str:
    verdict = "chance hardly explains the difference" if discrepancy.shifted else "chance may explain the difference"
    rows = f"{discrepancy.rows[0]:,} and {discrepancy.rows[1]:,} records"
    return (
        f"MMD² = {number_text(discrepancy.squared)}, p {p_text(discrepancy.p_value)}: {verdict}. Inputs of"
        f" {rows} were compared by {discrepancy.embedder or 'their embeddings'}."
    )


def _permutation_chart(discrepancy: MeanDiscrepancy) -> Chart | None:
    counts, edges = np.histogram(discrepancy.permuted, bins=_PERMUTATION_BINS)
    return histogram(
        edges.tolist(),
        counts.tolist(),
        f"MMD² of {len(discrepancy.permuted):,} random splits",
        number_text,
        of="permutations",
        mark=(discrepancy.squared, f"measured: {number_text(discrepancy.squared)}"),
    )
