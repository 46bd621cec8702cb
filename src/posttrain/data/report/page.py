"""The page of a dataset version: its quality report, and the drift since another version."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from posttrain.data.records.provenance import RECORD_KINDS
from posttrain.data.report.counts import LabelBalance
from posttrain.data.report.distribution import Distribution, histograms
from posttrain.data.report.drift import Drift
from posttrain.data.report.drift_section import drift_section
from posttrain.data.report.profile import Profile
from posttrain.data.report.rejections import DuplicateClusters, RejectionSummary
from posttrain.report.charts.bars import bars, count_rows, funnel_charts
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.histogram import histogram
from posttrain.report.formatting import number_text, percent_text, reason_text
from posttrain.report.section import Block, Fold, Grid, Page, Quote, Section, Table, Text, Tile, blocks
from posttrain.store.message import Message, counted

_BARS, _LABELS, _NGRAMS = 20, 30, 12


def dataset_page(profile: Profile, drift: Drift | None = None, heading: str = "Dataset", since: str = "") -> Page:
    """Returns the page.

    Args:
        profile: profile of the (newer) version.
        drift: changes from an older version to this one.
        heading: name of the version.
        since: name of the older version.
    """
    since = since or "an older version"
    sections = [
        _funnel_section(profile),
        _records_section(profile),
        _labels_section(profile),
        _lengths_section(profile),
        _languages_section(profile),
        _scores_section(profile),
        _duplicates_section(profile),
        _personal_section(profile),
        _rejections_section(profile),
        _words_section(profile),
        *([drift_section(drift, since)] if drift else []),
    ]
    sentence = f"Since {since}: {drift.verdict}." if drift else ""
    return Page(heading, "dataset", sentence, list(_headline(profile)), sections)


def _titled(title: str, chart: Chart | None) -> list[Block]:
    return blocks(Text(title, "heading"), chart) if chart else []


def _funnel_section(profile: Profile) -> Section:
    rows = [row for row in profile.funnel if row["reason"] != "kept"]
    counts = [(row["set"], _reason(row["step"], row["reason"]), row["count"]) for row in rows]
    charts = list(funnel_charts(counts))
    shown = [block for name, chart in charts for block in _titled(name if len(charts) > 1 else "", chart)]
    return Section("Funnel", [Text("Records read, rejected by reason, and kept.", "caption"), *shown])


def _records_section(profile: Profile) -> Section:
    splits = _count_bars(profile.splits, "records of each split")
    caption = f"The sources and kinds of this version's records{', and their splits' if splits else ''}."
    kinds = {RECORD_KINDS[kind]: count for kind, count in profile.kinds.items()}
    return Section.of(
        "Records",
        caption,
        _titled("By split", splits),
        _titled("By source", _count_bars(profile.sources, "records of each source")),
        _titled("By kind", _count_bars(kinds, "records of each kind")),
        empty="There are no records.",
    )


def _labels_section(profile: Profile) -> Section:
    between, chart = _label_bars(profile.labels)
    caption = (
        "Balance of the labels: 100% is even, and the last column is the ratio of the most to the least common label."
        + (f" The chart leaves out the {between} labels in the middle." if between else "")
    )
    empty = f"Answers are texts, not labels: {profile.answered:,} records have one." if profile.open_ended else ""
    balance = _balance(profile.balances) if chart else None
    return Section.of("Labels", caption, chart, balance, empty=empty or "No record has an answer.")


def _lengths_section(profile: Profile) -> Section:
    # The length of a label says nothing about the data.
    lengths = {
        name: item for name, item in profile.lengths.items() if profile.open_ended or not name.startswith("answer")
    }
    charts = _histograms(lengths)
    caption = "Lengths of the records' texts. Inputs are measured without system messages."
    fold = _folded("Lengths in numbers", _quantiles(lengths, profile.totals)) if charts else None
    return Section.of("Lengths", caption, Grid(charts), fold, empty="No record has a text.")


def _languages_section(profile: Profile) -> Section:
    caption = "The language of each record as detected by the pipeline's language step, including rejected records."
    empty = "No step of the pipeline detected languages."
    return Section.of("Languages", caption, _count_bars(profile.languages, "records in each language"), empty=empty)


def _scores_section(profile: Profile) -> Section:
    # A score that is the same everywhere has no histogram; it is listed in words.
    constant = [
        f"{reason_text(name)} ({number_text(item.low)})" for name, item in profile.scores.items() if _is_constant(item)
    ]
    return Section.of(
        "Scores",
        "Scores by the pipeline's steps of each record that reached them, kept or not.",
        Grid(_histograms({name: item for name, item in profile.scores.items() if not _is_constant(item)})),
        Text(f"The same for all records: {', '.join(constant)}.", "note") if constant else None,
        _folded("Scores in numbers", _quantiles(profile.scores)),
        *(_titled(reason_text(name), _count_bars(counts, name)) for name, counts in profile.categories.items()),
        empty="No step of the pipeline measured anything.",
    )


def _folded(title: str, table: Table) -> Fold | None:
    return Fold(title, [table]) if table.rows else None


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
            f"of {counted(sum(item.number for item in profile.clusters.values()), 'cluster')}",
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
    rows = [
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
    columns = ("split", "records", "labels", "entropy", "evenness", "most to least common")
    return Table(columns, rows, name="Balance of labels")


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
    return Table(("", first, "mean", "smallest", "5%", "median", "95%", "greatest"), rows, name="In numbers")


def _duplicates_section(profile: Profile) -> Section:
    caption = "Clusters of equal or nearly equal records, of which one was kept. Bars count clusters by their size."
    shown = [block for step, clusters in profile.clusters.items() for block in _clusters(step, clusters)]
    return Section.of("Duplicates", caption, shown, empty="No duplicates were removed.")


def _clusters(step: str, clusters: DuplicateClusters) -> list[Block]:
    sizes = sorted(clusters.sizes.items())
    # The largest clusters share one bar: a set of a million records has clusters of hundreds of sizes.
    bins = [(f"of {size:,}", number) for size, number in sizes[: _BARS - 1]]
    if larger := sum(number for _, number in sizes[_BARS - 1 :]):
        bins.append((f"of {sizes[_BARS - 1][0]:,} or more", larger))
    template = "{number} clusters, from which {removed} records were removed."
    sentence = Message(template, number=f"{clusters.number:,}", removed=f"{clusters.removed:,}")
    chart = bars(count_rows(bins), "clusters by how many records they held", columns=("records", "clusters"))
    largest = [
        Quote(f"{counted(each.size, 'record')} · cluster of {each.name}", each.texts) for each in clusters.largest
    ]
    return blocks(
        Text(reason_text(step), "heading"), Text(sentence, "note"), chart, Fold("The largest clusters", largest)
    )


def _personal_section(profile: Profile) -> Section:
    rows = [
        (reason_text(kind), float(matches.hits), f"{matches.hits:,} in {counted(matches.records, 'record')}")
        for kind, matches in profile.pii.items()
    ]
    caption = "Matches of each kind of personal data, and the number of records with them."
    chart = bars(rows, "personal data found, by kind", columns=("kind", "matches"))
    return Section.of("Personal data", caption, chart, empty="No step of the pipeline found personal data.")


def _rejections_section(profile: Profile) -> Section:
    by_step: dict[str, list[RejectionSummary]] = {}
    for item in profile.rejected:
        by_step.setdefault(item.step, []).append(item)
    folds = [
        Fold(
            reason_text(step),
            [block for group in groups for block in _rejected(group)],
            remark=", ".join(f"{reason_text(group.reason)} {group.count:,}" for group in groups),
        )
        for step, groups in by_step.items()
    ]
    caption = (
        "At most five records for each reason, sampled by the hash of their ids. All are stored and can be listed."
    )
    return Section.of("Rejections", caption, folds, empty="No record was rejected.")


def _rejected(group: RejectionSummary) -> Iterable[Block]:
    reason = reason_text(group.reason)
    yield Text(f"{reason}: {group.count:,} record{'' if group.count == 1 else 's'}", "heading")
    for example in group.examples:
        remarks = [example.detail or reason]
        remarks += [f"score {example.score:.4g}"] if example.score is not None else []
        remarks += [f"kept in its place: {example.kept}"] if example.kept else []
        texts = [example.text, *([f"→ {example.answer}"] if example.answer else [])]
        yield Quote(f"{example.place} · {example.id}", texts, " · ".join(remarks))


def _words_section(profile: Profile) -> Section:
    count = len(profile.sample)
    whole = "all" if count == profile.records else "a sample of"
    shown: list[Block] = []
    for part, lists in profile.ngrams.items():
        shown += blocks(Text(part if len(profile.ngrams) > 1 else "", "heading"), Grid(list(_ngrams(lists))))
    caption = f"The most common runs of words in {whole} {counted(count, 'record')}."
    return Section.of("Words", caption, shown, empty="There are no words.")


def _ngrams(lists: Iterable[tuple[tuple[str, int], ...]]) -> Iterable[Chart]:
    for n, runs in enumerate(lists, 1):
        title = "Most common words" if n == 1 else f"Most common runs of {n} words"
        if chart := bars(count_rows(runs[:_NGRAMS]), title, columns=("words", "records")):
            yield replace(chart, heading=title)
