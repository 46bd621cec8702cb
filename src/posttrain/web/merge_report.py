"""The page of the conflicts between models: what merging them would cancel, what to do about it, and what was kept."""

from pathlib import Path

from posttrain.merge.conflicts import RESOLUTIONS, ConflictReport
from posttrain.merge.recommendation import recommend, warnings_of
from posttrain.report.charts.chart import Chart
from posttrain.report.charts.heat_map import value_map
from posttrain.report.formatting import percent_text
from posttrain.tune.merges.validation import Validation
from posttrain.web.merge_validation_view import validation_view
from posttrain.web.page import Table, Tile, now_text, render_page, write_page

_METHODS = {
    "average": "average",
    "zero": "zero where signs oppose",
    "magnitude": "largest magnitude where signs oppose",
    "ties": "TIES, the largest fifth",
}

_PAIR_ONLY = "--method resolve_conflicts --set resolution="

_COMMANDS = {
    "average": "--method task_arithmetic --set normalize=true",
    "zero": f"{_PAIR_ONLY}zero",
    "magnitude": f"{_PAIR_ONLY}magnitude",
    "ties": "--method ties --set density=0.2",
}
"""The options of `posttrain merge` that choose each resolution."""


def render_merge_report(report: ConflictReport, validation: Validation | None = None) -> str:
    """Renders the page as HTML; it loads nothing.

    Args:
        report: the conflicts.
        validation: what the merged model kept, where it was measured.
    """
    method, reason = recommend(report)
    name = method.replace("_", " ") if method != "ties" else "TIES"
    return render_page(
        "merge_report.html",
        headline=_headline(report),
        sentence=f"Recommended: {name}, as {reason}.",
        warnings=warnings_of(report),
        models=", ".join(report.models),
        base=report.base,
        pairs=_pairs(report),
        norms=_norms(report),
        charts=_charts(report),
        kept=_kept(report),
        commands=_commands(report),
        layers=_layers(report),
        validation=validation_view(validation) if validation else None,
        created=now_text(),
    )


def write_merge_report(path: Path, report: ConflictReport, validation: Validation | None = None) -> None:
    """Writes the page atomically to ``path``, whose folder exists; see `render_merge_report`.

    Raises:
        UserError: the disk refused.
    """
    write_page(path, render_merge_report(report, validation))


def _headline(report: ConflictReport) -> tuple[Tile, ...]:
    overall, pairs = report.overall, report.pairs
    tiles: list[Tile] = [(percent_text(overall.interference), "cancels", "of the changes, if they are added")]
    if pairs:
        opposed = max(pairs, key=lambda pair: overall.opposed_weight_share(*pair))
        closest = min(pairs, key=lambda pair: overall.cosine(*pair))
        tiles.append((percent_text(overall.opposed_weight_share(*opposed)), "opposed signs", _pair(report, opposed)))
        tiles.append((f"{overall.cosine(*closest):.2f}", "smallest cosine", _pair(report, closest)))
    return tuple(tiles)


def _pair(report: ConflictReport, pair: tuple[int, int]) -> str:
    return " and ".join(_short(report.models[model]) for model in pair)


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _pairs(report: ConflictReport) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            _pair(report, pair),
            f"{report.overall.cosine(*pair):.3f}",
            percent_text(report.overall.opposed_share(*pair)),
            percent_text(report.overall.opposed_weight_share(*pair)),
        )
        for pair in report.pairs
    ]
    return ("pair", "cosine", "opposed signs", "of the weight"), rows


def _norms(report: ConflictReport) -> Table:
    rows: list[tuple[str, ...]] = [
        (_short(name), f"{report.overall.norm_ratio(model):.4f}", f"{report.overall.weight_cosine(model):.4f}")
        for model, name in enumerate(report.models)
    ]
    return ("model", "task vector's norm by the base's", "cosine of the weights with the base's"), rows


def _kept(report: ConflictReport) -> Table:
    rows = []
    for resolution in RESOLUTIONS:
        cells = [percent_text(report.overall.kept_share(resolution, model)) for model in range(len(report.models))]
        rows.append((_METHODS[resolution], *cells))
    return ("resolution", *map(_short, report.models)), rows


def _commands(report: ConflictReport) -> Table:
    rows: list[tuple[str, ...]] = [
        (_METHODS[resolution], command)
        for resolution, command in _COMMANDS.items()
        if len(report.models) == 2 or not command.startswith(_PAIR_ONLY)
    ]
    return ("resolution", "options of posttrain merge"), rows


def _charts(report: ConflictReport) -> tuple[tuple[str, Chart | None], ...]:
    layers = list(report.layers)
    names = [_pair(report, pair) for pair in report.pairs]

    def values(measure: str) -> dict[tuple[str, str], float]:
        return {
            (name, layer): getattr(sums, measure)(*pair)
            for layer, sums in report.layers.items()
            for name, pair in zip(names, report.pairs, strict=True)
        }

    opposed, cosine = "Share of the weight whose signs oppose", "Cosine between the task vectors"
    return (
        (opposed, value_map(values("opposed_weight_share"), names, layers, f"{opposed}, by layer", 0.0, 1.0)),
        (cosine, value_map(values("cosine"), names, layers, f"{cosine}, by layer", -1.0, 1.0)),
    )


def _layers(report: ConflictReport) -> Table:
    rows = [
        (
            layer,
            percent_text(sums.interference),
            *(f"{sums.norm_ratio(model):.4f}" for model in range(len(report.models))),
        )
        for layer, sums in report.layers.items()
    ]
    return ("layer", "cancels", *(f"norm of {_short(name)}" for name in report.models)), rows
