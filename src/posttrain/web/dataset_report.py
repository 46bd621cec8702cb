"""The page of a dataset version: its quality report, and the drift since another version."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.data.records.provenance import RECORD_KINDS
from posttrain.data.report.counts import LabelBalance
from posttrain.data.report.distribution import Distribution, histograms
from posttrain.data.report.drift import Drift
from posttrain.data.report.profile import Profile
from posttrain.data.report.rejections import DuplicateClusters, RejectionSummary
from posttrain.report.charts.bars import bars, count_rows, funnel_charts
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.histogram import histogram
from posttrain.report.formatting import number_text, percent_text, reason_text
from posttrain.web.drift_view import drift_view
from posttrain.web.page import Table, Tile, now_text, render_page, write_page

_BARS, _LABELS, _NGRAMS = 20, 30, 12


def render_dataset_report(
    profile: Profile, drift: Drift | None = None, heading: str = "Dataset", since: str = "", created: str = ""
) -> str:
    """Renders the page as HTML; it loads nothing.

    Args:
        profile: profile of the (newer) version.
        drift: changes from an older version to this one.
        heading: name of the version.
        since: name of the older version.
        created: time of creation, as text.
    """
    return render_page(
        "data_report.html",
        styles=("data_report.css",),
        shown=profile_view(profile),
        drift=drift_view(drift) if drift else None,
        heading=heading,
        since=since or "an older version",
        created=created,
    )


def write_dataset_report(
    path: Path, profile: Profile, drift: Drift | None = None, heading: str = "Dataset", since: str = ""
) -> None:
    """Writes the page atomically to ``path``, whose folder exists. Takes the arguments of `render_dataset_report`.

    Raises:
        UserError: the disk refused.
    """
    write_page(path, render_dataset_report(profile, drift, heading, since, now_text()))


@dataclass(frozen=True)
class ProfileView:
    """A quality profile as charts, tables and sentences; empty fields are not shown.

    Args:
        funnels: name of the set and chart.
        labels: a chart of the labels, those in the middle left out, and how many those are.
        balance, lengths, scores: tables.
        length_charts, score_charts: small ones.
        categories: name of a fact and chart.
        clusters: step, sentence, chart and the clusters.
        rejected: the reasons of each step's rejections.
        ngrams: part, and small charts of runs of 1, 2 and 3 words, each with its title.
        constant: scores that are the same for all records, in words.
    """

    profile: Profile
    headline: tuple[Tile, ...]
    funnels: tuple[tuple[str, Chart], ...]
    splits: Chart | None
    sources: Chart | None
    kinds: Chart | None
    labels: Chart | None
    labels_between: int
    balance: Table
    length_charts: tuple[Chart, ...]
    lengths: Table
    languages: Chart | None
    score_charts: tuple[Chart, ...]
    scores: Table
    categories: tuple[tuple[str, Chart | None], ...]
    clusters: tuple[tuple[str, str, Chart | None, DuplicateClusters], ...]
    pii: Chart | None
    rejected: Mapping[str, tuple[RejectionSummary, ...]]
    ngrams: tuple[tuple[str, tuple[tuple[str, Chart | None], ...]], ...]
    constant: tuple[str, ...]


def profile_view(profile: Profile) -> ProfileView:
    """Builds the charts, tables and sentences about a version."""
    # The length of a label says nothing about the data.
    lengths = {
        name: item for name, item in profile.lengths.items() if profile.open_ended or not name.startswith("answer")
    }
    between, labels = _label_bars(profile.labels)
    by_step: dict[str, tuple[RejectionSummary, ...]] = {}
    for item in profile.rejected:
        by_step[item.step] = (*by_step.get(item.step, ()), item)
    return ProfileView(
        profile=profile,
        headline=tuple(_headline(profile)),
        funnels=tuple(_funnels(profile)),
        splits=_count_bars(profile.splits, "records of each split"),
        kinds=_count_bars({RECORD_KINDS[kind]: count for kind, count in profile.kinds.items()}, "records of each kind"),
        sources=_count_bars(profile.sources, "records of each source"),
        labels=labels,
        labels_between=between,
        balance=_balance(profile.balances),
        length_charts=_histograms(lengths),
        lengths=_quantiles(lengths, profile.totals),
        languages=_count_bars(profile.languages, "records in each language"),
        # A score that is the same everywhere has no histogram; it is listed in words.
        score_charts=_histograms({name: item for name, item in profile.scores.items() if not _is_constant(item)}),
        scores=_quantiles(profile.scores),
        categories=tuple((name, _count_bars(counts, name)) for name, counts in profile.categories.items()),
        clusters=tuple(_clusters(profile.clusters)),
        pii=_pii(profile),
        rejected=by_step,
        ngrams=tuple((part, tuple(_ngrams(lists))) for part, lists in profile.ngrams.items()),
        constant=tuple(
            f"{reason_text(name)} ({number_text(item.low)})"
            for name, item in profile.scores.items()
            if _is_constant(item)
        ),
    )


def _headline(profile: Profile) -> Iterable[Tile]:
    came = sum(row["count"] for row in profile.funnel if row["reason"] == "in")
    splits = f"in {len(profile.splits)} splits" if len(profile.splits) > 1 else ""
    yield f"{profile.records:,}", "records", splits
    rejected = sum(item.count for item in profile.rejected)
    yield f"{rejected:,}", "rejected", f"of {came:,} that came in" if came else ""
    if profile.labels:
        evenness = next(iter(profile.balances.values())).evenness
        yield f"{len(profile.labels):,}", "labels", f"{100 * evenness:.0f}% even"
    elif profile.answered:
        yield f"{profile.answered:,}", "with an answer", percent_text(profile.answered / max(profile.records, 1))
    unit = "tokens" if "input tokens" in profile.totals else "words"
    total = sum(count for name, count in profile.totals.items() if name.endswith(unit))
    yield _short_count(total), unit, "answers included" if profile.answered else "in all records"
    if profile.clusters:
        removed = sum(item.removed for item in profile.clusters.values())
        yield (
            f"{removed:,}",
            "duplicates removed",
            f"of {sum(item.number for item in profile.clusters.values()):,} clusters",
        )
    if profile.pii:
        # The kinds overlap in records, so that their sum would count some twice: the greatest is a safe lower bound.
        matched = max(item.records for item in profile.pii.values())
        yield f"{matched:,}", "with personal data", "records, as they came in"


def _short_count(count: int) -> str:
    """Formats ``119,530`` and ``12.3 M``."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:,}"


def _funnels(profile: Profile) -> Iterable[tuple[str, Chart]]:
    rows = [row for row in profile.funnel if row["reason"] != "kept"]
    return funnel_charts([(row["set"], _reason(row["step"], row["reason"]), row["count"]) for row in rows])


def _reason(step: str, reason: str) -> str | None:
    if reason == "in":
        return None
    # Several steps may reject for `too short`: the step is named unless the reason names it.
    return reason_text(reason if reason_text(step) in reason_text(reason) else f"{step}: {reason}")


def _count_bars(counts: Mapping[str, int], title: str) -> Chart | None:
    """Draws a bar for each of the most common names, and one for all others."""
    total = sum(counts.values())
    rows = [(name, float(count), count) for name, count in list(counts.items())[:_BARS]]
    # The rest is one bar, so that the bars add up to all records.
    if others := total - sum(count for _, _, count in rows):
        rows.append((f"{len(counts) - _BARS:,} others", float(others), others))
    labelled = [(name, value, f"{count:,} ({percent_text(count / total)})") for name, value, count in rows]
    return bars(labelled, title, columns=("", "records"))


def _label_bars(counts: Mapping[str, int]) -> tuple[int, Chart | None]:
    rows = count_rows(counts.items())
    between = max(len(rows) - _LABELS, 0)
    if between:
        # Both ends: the rarest labels are those worth adding records for.
        rows = rows[: _LABELS // 2] + rows[-_LABELS // 2 :]
    title = "records of each label, the most common first"
    return between, bars(rows, title, columns=("label", "records"))


def _balance(balances: Mapping[str, LabelBalance]) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            side,
            f"{sum(balance.counts.values()):,}",
            f"{len(balance.counts):,}",
            f"{balance.entropy:.2f} bits",
            f"{100 * balance.evenness:.1f}%",
            f"{balance.imbalance:.3g} to 1",
        )
        for side, balance in balances.items()
    ]
    return ("split", "records", "labels", "entropy", "evenness", "most to least common"), rows


def _histograms(distributions: Mapping[str, Distribution]) -> tuple[Chart, ...]:
    charts = []
    for name, distribution in distributions.items():
        edges, (counts,), (above,) = histograms([distribution])
        name = reason_text(name)
        charts.append(histogram(edges.tolist(), counts.tolist(), name, number_text, above=above, small=True))
    return tuple(chart for chart in charts if chart)


def _is_constant(distribution: Distribution) -> bool:
    return distribution.count > 0 and distribution.low == distribution.high


def _quantiles(distributions: Mapping[str, Distribution], totals: Mapping[str, int] | None = None) -> Table:
    rows = []
    for name, distribution in distributions.items():
        if not distribution.count:
            continue
        numbers = (
            distribution.mean,
            distribution.low,
            distribution.quantile(0.05),
            distribution.quantile(0.5),
            distribution.quantile(0.95),
            distribution.high,
        )
        total = (f"{totals[name]:,}",) if totals is not None else (f"{distribution.count:,}",)
        rows.append((reason_text(name), *total, *(number_text(number) for number in numbers)))
    first = "all together" if totals is not None else "records"
    return ("", first, "mean", "smallest", "5%", "median", "95%", "greatest"), rows


def _clusters(clusters: Mapping[str, DuplicateClusters]) -> Iterable[tuple[str, str, Chart | None, DuplicateClusters]]:
    for step, duplicates in clusters.items():
        sentence = f"{duplicates.number:,} clusters, from which {duplicates.removed:,} records were removed"
        sizes = sorted(duplicates.sizes.items())
        # The largest clusters share one bar: a set of a million records has clusters of hundreds of sizes.
        bins = [(f"of {size:,}", number) for size, number in sizes[: _BARS - 1]]
        if larger := sum(number for _, number in sizes[_BARS - 1 :]):
            bins.append((f"of {sizes[_BARS - 1][0]:,} or more", larger))
        yield (
            step,
            sentence,
            bars(count_rows(bins), "clusters by how many records they held", columns=("records", "clusters")),
            duplicates,
        )


def _pii(profile: Profile) -> Chart | None:
    rows = [
        (reason_text(kind), float(matches.hits), f"{matches.hits:,} in {matches.records:,} records")
        for kind, matches in profile.pii.items()
    ]
    return bars(rows, "personal data found, by kind", columns=("kind", "matches"))


def _ngrams(lists: Iterable[tuple[tuple[str, int], ...]]) -> Iterable[tuple[str, Chart | None]]:
    for n, runs in enumerate(lists, 1):
        title = "Most common words" if n == 1 else f"Most common runs of {n} words"
        if runs:
            yield title, bars(count_rows(runs[:_NGRAMS]), title, columns=("words", "records"))
