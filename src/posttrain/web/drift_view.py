"""Charts and tables of the drift between two dataset versions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

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
from posttrain.web.charts.bars import bars, paired_bars
from posttrain.web.charts.histogram import histogram
from posttrain.web.charts.svg import responsive, without_step
from posttrain.web.formatting import number_text, percent_text, reason_text, signed_text
from posttrain.web.page import Table

_NUMBERS, _CHANGED, _NGRAMS, _PERMUTATION_BINS = 20, 15, 15, 30
_NAMES = ("older version", "newer version")


@dataclass(frozen=True)
class DriftView:
    """What changed as markup and words; what has nothing to show is empty.

    Args:
        stability: bars of the greatest indices, ``others`` how many are not drawn, and ``moved`` the bins of those
            that moved: name and chart.
        divergence: bars of every set of shares, and ``shares`` those of categories: name, sentence and chart.
        ngrams: what happened to runs of words, and a table of those.
        inputs: a sentence and a chart of the permutation test.
    """

    drift: Drift
    stability: Markup
    others: int
    moved: tuple[tuple[str, Markup], ...]
    divergence: Markup
    shares: tuple[tuple[str, str, Markup], ...]
    ngrams: tuple[tuple[str, Table], ...]
    inputs: tuple[str, Markup] | None


def drift_view(drift: Drift) -> DriftView:
    """Everything about a change."""
    numbers = sorted(drift.numbers, key=lambda one: (-one.index, one.name))
    return DriftView(
        drift=drift,
        stability=_stability_bars(numbers),
        others=max(len(numbers) - _NUMBERS, 0),
        moved=tuple((reason_text(one.name), _bin_bars(one)) for one in numbers[:4] if one.index >= MODERATE),
        divergence=_divergence_bars(drift.shares),
        shares=tuple(
            (one.name, _divergence_sentence(one), _share_bars(one)) for one in drift.shares if one.name != WORDS
        ),
        ngrams=tuple(_ngrams(drift)),
        inputs=(_permutation_sentence(drift.inputs), _permutation_chart(drift.inputs)) if drift.inputs else None,
    )


def _stability_bars(numbers: Sequence[PopulationStability]) -> Markup:
    rows = [(reason_text(one.name), one.index, f"{one.index:.3f} {one.level}") for one in numbers[:_NUMBERS]]
    most = max([2 * LARGE, *(one.index for one in numbers)])
    marks = ((MODERATE, f"{MODERATE:g}"), (LARGE, f"{LARGE:g}"))

    def draw(width: int) -> str:
        fitted = [(without_step(name, width), value, words) for name, value, words in rows]
        return bars(fitted, "population stability index of each number", width=width, full=most, marks=marks)

    return responsive(draw)


def _bin_bars(one: PopulationStability) -> Markup:
    ends = [number_text(edge) for edge in one.edges]
    names = [f"to {ends[0]}", *(f"to {end}" for end in ends[1:]), f"above {ends[-1]}"]
    rows = [
        (name, before, after) for name, before, after in zip(names, one.old, one.new, strict=True) if before or after
    ]
    title = f"shares of records by {reason_text(one.name)}, in the older version's tenths"
    return responsive(paired_bars, rows, title, percent_text, names=_NAMES)


def _divergence_bars(shares: Sequence[Divergence]) -> Markup:
    ordered = sorted(shares, key=lambda one: (-one.divergence, one.name))
    rows = [
        (reason_text(one.name), one.divergence, f"{one.divergence:.3f} {'shifted' if one.shifted else 'stable'}")
        for one in ordered
    ]
    full = max([0.1, *(one.divergence for one in ordered)])
    marks = ((MIN_DIVERGENCE, f"{MIN_DIVERGENCE:g}"),)
    return responsive(bars, rows, "Jensen–Shannon divergence in bits", full=full, kind="b", marks=marks)


def _divergence_sentence(one: Divergence) -> str:
    test = "" if one.p_value is None else f"; chi-square test p {p_text(one.p_value)}"
    return (
        f"Jensen–Shannon divergence {one.divergence:.3f} bits (distance {one.distance:.2f}), "
        f"by chance about {number_text(one.by_chance)}{test}"
    )


def _share_bars(one: Divergence) -> Markup:
    totals = sum(one.old.values()), sum(one.new.values())
    rows = [(name, one.old[name] / totals[0], one.new[name] / totals[1]) for name in list(one.old)[:_CHANGED]]
    title = f"shares of {reason_text(one.name)}, those that changed most first"
    return responsive(paired_bars, rows, title, percent_text, names=_NAMES)


def _ngrams(drift: Drift) -> Iterable[tuple[str, Table]]:
    for part, changes in drift.ngrams.items():
        kinds = (
            (f"New in the {part}", changes.appeared),
            (f"Vanished from the {part}", changes.vanished),
            (f"More common in the {part}", changes.more),
            (f"Less common in the {part}", changes.less),
        )
        for title, found in kinds:
            if found:
                head = ("words", "older", "newer", "ratio", "log-odds", "z")
                yield title, (head, [_ngram_row(one) for one in found[:_NGRAMS]])


def _ngram_row(one: NgramChange) -> tuple[str, ...]:
    ratio = "new" if one.ratio is None else "gone" if not one.new else f"{one.ratio:.2g}×"
    return one.ngram, f"{one.old:,}", f"{one.new:,}", ratio, signed_text(one.log_odds), signed_text(one.z)


def p_text(p_value: float) -> str:
    return "< 0.0001" if p_value < 1e-4 else f"= {p_value:.2g}"


def _permutation_sentence(one: MeanDiscrepancy) -> str:
    verdict = "chance hardly explains the difference" if one.shifted else "chance may explain the difference"
    return (
        f"MMD² = {number_text(one.squared)}, p {p_text(one.p_value)}: {verdict}. Compared were the inputs of "
        f"{one.rows[0]:,} and {one.rows[1]:,} records, by {one.embedder or 'their embeddings'}."
    )


def _permutation_chart(one: MeanDiscrepancy) -> Markup:
    counts, edges = np.histogram(one.permuted, bins=_PERMUTATION_BINS)
    return responsive(
        histogram,
        edges.tolist(),
        counts.tolist(),
        f"MMD² of {len(one.permuted):,} random splits",
        number_text,
        of="permutations",
        mark=(one.squared, f"measured: {number_text(one.squared)}"),
    )
