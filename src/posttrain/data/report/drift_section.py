"""Charts and tables of the drift between two dataset versions."""

from collections.abc import Iterable, Sequence

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
from posttrain.report.formatting import number_text, percent_text, reason_text, signed_text
from posttrain.report.section import Block, Fold, Section, Table, Text, blocks
from posttrain.store.message import counted

_NUMBERS, _CHANGED, _CHANGES = 20, 15, 15
_NAMES = ("older version", "newer version")

_STABILITY = (
    "Population stability index over the older version's tenths. Lines mark 0.1 and 0.25, the thresholds of credit "
    "scoring for a moderate and a large change (Siddiqi 2006). Changes that chance explains (p ≥ 0.01) are called "
    "stable."
)
_DIVERGENCE = (
    "Jensen–Shannon divergence in bits: 0 for equal shares, 1 for nothing in common. The line marks 0.01, a distance "
    "of 0.1, the drift threshold of Evidently and NannyML."
)
_NGRAM_CHANGES = (
    "Runs of 1 to 3 words whose log-odds changed significantly (|z| ≥ 3.29, Dirichlet prior of both versions; Monroe "
    "et al. 2008), counted in a sample of each version where it is large."
)
_NO_NGRAM_CHANGE = "No run of 1 to 3 words appeared, vanished or became significantly more or less common."


def drift_section(drift: Drift, since: str) -> Section:
    """Shows what changed.

    Args:
        since: name of the older version.
    """
    before, now = drift.records
    caption = f"What changed from {since} ({counted(before, 'record')}) to this version ({counted(now, 'record')})."
    left_out = reason_text(f"Not compared: {'; '.join(drift.incomparable)}.") if drift.incomparable else ""
    parts = (_numbers(drift), _shares(drift), _inputs(drift), _words(drift))
    verdict = Text(f"{drift.verdict}.", "verdict")
    return Section("Drift", blocks(Text(caption, "caption"), verdict, Text(left_out, "note"), parts))


def _numbers(drift: Drift) -> list[Block]:
    numbers = sorted(drift.numbers, key=lambda statistic: (-statistic.index, statistic.name))
    chart = _stability_bars(numbers)
    if chart is None:
        return []
    others = len(numbers) - _NUMBERS
    moved = [
        (Text(f"{reason_text(statistic.name)}: shares of records", "heading"), _bin_bars(statistic))
        for statistic in numbers[:4]
        if statistic.index >= MODERATE
    ]
    rest = Text(f"{others} more numbers moved less." if others > 0 else "", "note")
    return blocks(Text("Numbers", "heading"), Text(_STABILITY, "note"), chart, rest, moved)


def _shares(drift: Drift) -> list[Block]:
    chart = _divergence_bars(drift.shares)
    if chart is None:
        return []
    shown = blocks(Text("Shares", "heading"), Text(_DIVERGENCE, "note"), chart)
    for statistic in drift.shares:
        if statistic.name != WORDS and (bars_of := _share_bars(statistic)):
            heading = Text(f"{reason_text(statistic.name)} before and after", "heading")
            shown += [heading, Text(f"{_divergence_sentence(statistic)}.", "note"), bars_of]
    return shown


def _inputs(drift: Drift) -> list[Block]:
    if drift.inputs is None:
        return []
    return [Text("Inputs", "heading"), Text(_permutation_sentence(drift.inputs), "note")]


def _words(drift: Drift) -> list[Block]:
    if not drift.ngrams:
        return []
    folds = list(_ngrams(drift))
    note = _NGRAM_CHANGES if folds else _NO_NGRAM_CHANGE
    return blocks(Text("Words", "heading"), Text(note, "note"), folds)


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


def _ngrams(drift: Drift) -> Iterable[Fold]:
    columns = ("words", "older", "newer", "ratio", "log-odds", "z")
    shown = 0
    for part, changes in drift.ngrams.items():
        kinds = (
            (f"New in the {part}", changes.appeared),
            (f"Vanished from the {part}", changes.vanished),
            (f"More common in the {part}", changes.more),
            (f"Less common in the {part}", changes.less),
        )
        for title, ngram_changes in kinds:
            if ngram_changes:
                rows = [_ngram_row(change) for change in ngram_changes[:_CHANGES]]
                yield Fold(title, [Table(columns, rows, name=title)], is_open=shown < 2)
                shown += 1


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
    rows = f"{discrepancy.rows[0]:,} and {counted(discrepancy.rows[1], 'record')}"
    return (
        f"MMD² = {number_text(discrepancy.squared)}, p {p_text(discrepancy.p_value)}: {verdict}. Inputs of"
        f" {rows} were compared by {discrepancy.embedder or 'their embeddings'} (Gretton et al. 2012)."
    )
