"""The page of the conflicts between models: what merging them would cancel, what to do about it, and what was kept."""

from collections.abc import Sequence
from pathlib import Path

from posttrain.merge.conflicts import RESOLUTIONS, ConflictReport
from posttrain.merge.recommendation import LossBarrier, recommend, warnings_of
from posttrain.report.charts.chart import Chart, Option, series_colour, ticks, value_axis
from posttrain.report.charts.heat_map import value_map
from posttrain.report.formatting import percent_text
from posttrain.tune.merges.importance import ModelImportance
from posttrain.tune.merges.validation import Validation
from posttrain.web.merge_validation_view import validation_view
from posttrain.web.page import Table, Tile, now_text, render_page, write_page

_METHODS = {
    "average": "average",
    "zero": "zero where signs oppose",
    "magnitude": "largest magnitude where signs oppose",
    "importance": "by importance where signs oppose",
    "ties": "TIES, the largest fifth",
}

_PAIR_ONLY = "--method resolve_conflicts --set resolution="

_COMMANDS = {
    "average": "--method task_arithmetic --set normalize=true",
    "zero": f"{_PAIR_ONLY}zero",
    "magnitude": f"{_PAIR_ONLY}magnitude",
    "importance": f"{_PAIR_ONLY}importance --set importance=…",
    "ties": "--method ties --set density=0.2",
}
"""The options of `posttrain merge` that choose each resolution."""


def render_merge_report(
    report: ConflictReport,
    barriers: Sequence[LossBarrier] = (),
    importances: Sequence[ModelImportance] = (),
    validation: Validation | None = None,
) -> str:
    """Renders the page as HTML; it loads nothing.

    Args:
        report: the conflicts.
        barriers: the losses between the models, where they were measured.
        importances: those of the models' layers, where they were measured.
        validation: what the merged model kept, where it was measured.
    """
    method, reason = recommend(report, barriers)
    name = method.replace("_", " ") if method != "ties" else "TIES"
    return render_page(
        "merge_report.html",
        headline=_headline(report, barriers),
        sentence=f"Recommended: {name}, as {reason}.",
        warnings=warnings_of(report, barriers),
        models=", ".join(report.models),
        base=report.base,
        pairs=_pairs(report),
        norms=_norms(report),
        charts=_charts(report),
        kept=_kept(report),
        commands=_commands(report),
        layers=_layers(report),
        losses=_loss_chart(barriers),
        barriers=_barriers(barriers),
        importance=_importance_chart(importances),
        importances=_importances(importances),
        validation=validation_view(validation) if validation else None,
        created=now_text(),
    )


def write_merge_report(
    path: Path,
    report: ConflictReport,
    barriers: Sequence[LossBarrier] = (),
    importances: Sequence[ModelImportance] = (),
    validation: Validation | None = None,
) -> None:
    """Writes the page atomically to ``path``, whose folder exists; see `render_merge_report`.

    Raises:
        UserError: the disk refused.
    """
    write_page(path, render_merge_report(report, barriers, importances, validation))


def _headline(report: ConflictReport, barriers: Sequence[LossBarrier]) -> tuple[Tile, ...]:
    overall, pairs = report.overall, report.pairs
    tiles: list[Tile] = [(percent_text(overall.interference), "cancels", "of the changes, if they are added")]
    if pairs:
        opposed = max(pairs, key=lambda pair: overall.opposed_weight_share(*pair))
        closest = min(pairs, key=lambda pair: overall.cosine(*pair))
        tiles.append((percent_text(overall.opposed_weight_share(*opposed)), "opposed signs", _pair(report, opposed)))
        tiles.append((f"{overall.cosine(*closest):.2f}", "smallest cosine", _pair(report, closest)))
    if barriers:
        highest = max(barriers, key=lambda barrier: barrier.height)
        tiles.append((f"{highest.height:.3f}", "loss barrier", f"nats a token, {_names(highest)}"))
    return tuple(tiles)


def _pair(report: ConflictReport, pair: tuple[int, int]) -> str:
    return " and ".join(_short(report.models[model]) for model in pair)


def _names(barrier: LossBarrier) -> str:
    return " and ".join(map(_short, barrier.models))


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _pairs(report: ConflictReport) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            _pair(report, pair),
            f"{report.overall.cosine(*pair):.3f}",
            percent_text(report.overall.opposed_share(*pair)),
            percent_text(report.overall.opposed_weight_share(*pair)),
            percent_text(report.overall.expected_interference(*pair)),
            f"{report.overall.subspace_overlap(*pair):.3f}",
        )
        for pair in report.pairs
    ]
    return ("pair", "cosine", "opposed signs", "of the weight", "expected interference", "subspace overlap"), rows


def _norms(report: ConflictReport) -> Table:
    rows: list[tuple[str, ...]] = [
        (_short(name), f"{report.overall.norm_ratio(model):.4f}", f"{report.overall.weight_cosine(model):.4f}")
        for model, name in enumerate(report.models)
    ]
    return ("model", "task vector's norm by the base's", "cosine of the weights with the base's"), rows


def _kept(report: ConflictReport) -> Table:
    rows = []
    for resolution in RESOLUTIONS:
        shares = [percent_text(report.overall.kept_share(resolution, model)) for model in range(len(report.models))]
        cosines = [f"{report.overall.kept_cosine(resolution, model):.2f}" for model in range(len(report.models))]
        cells = [f"{share} ({cosine})" for share, cosine in zip(shares, cosines, strict=True)]
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


def _loss_chart(barriers: Sequence[LossBarrier]) -> Chart | None:
    """Draws the loss at the points between each two models, and the line between the ends."""
    if not barriers:
        return None
    levels = ticks(min(min(b.losses) for b in barriers), max(max(b.losses) for b in barriers), 4)
    series: list[Option] = []
    for number, barrier in enumerate(barriers):
        name, colour = _names(barrier), series_colour(number)
        points = [
            {"value": point, "tip": f"{name}, {point[0]:.2f} of the second: {point[1]:.4f} nats a token"}
            for point in zip(barrier.shares, barrier.losses, strict=True)
        ]
        style = {"lineStyle": {"color": colour, "width": 2.2}, "itemStyle": {"color": colour}}
        marks = {"showSymbol": True, "symbol": "circle", "symbolSize": 7}
        series.append({"type": "line", "name": name, "data": points, **style, **marks})
        ends = [(barrier.shares[at], barrier.losses[at]) for at in (0, -1)]
        dashed = {"color": colour, "width": 1, "type": [5, 4]}
        series.append({"type": "line", "name": "", "data": ends, "lineStyle": dashed, "showSymbol": False})
    title = "Loss between the models, by the share of the second"
    option: Option = {
        "grid": {"top": 10, "bottom": 0},
        "xAxis": {"type": "value", "min": 0, "max": 1, "name": "share of the second model", "nameLocation": "middle"},
        "yAxis": value_axis(levels, lambda level: f"{level:g}"),
        "tooltip": {"trigger": "item"},
        "legend": {"data": [_names(barrier) for barrier in barriers]},
        "series": series,
    }
    shares = barriers[0].shares
    rows = [(_names(b), *(f"{loss:.4f}" for loss in b.losses)) for b in barriers]
    return Chart(title, option, 280, ("pair", *(f"{share:.2f}" for share in shares)), rows)


def _barriers(barriers: Sequence[LossBarrier]) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            _names(barrier),
            f"{barrier.losses[0]:.4f}",
            f"{barrier.losses[-1]:.4f}",
            f"{barrier.height:.4f}",
            f"{barrier.low:.4f} to {barrier.high:.4f}",
            f"{barrier.records:,}",
        )
        for barrier in barriers
    ]
    return ("pair", "loss of the first", "loss of the second", "barrier", "95% interval", "records"), rows


def _importance_chart(importances: Sequence[ModelImportance]) -> Chart | None:
    if not importances:
        return None
    names = [_short(model.name) for model in importances]
    layers = [f"layer {number}" for number in range(len(importances[0].layers))]
    values = {
        (name, layer): interval.difference
        for name, model in zip(names, importances, strict=True)
        for layer, interval in zip(layers, model.layers, strict=True)
    }
    return value_map(values, names, layers, "Importance of the layers, in nats a token", 0.0, max(values.values()))


def _importances(importances: Sequence[ModelImportance]) -> Table:
    rows = []
    for layer in range(len(importances[0].layers) if importances else 0):
        cells = []
        for model in importances:
            interval = model.layers[layer]
            heads = [head.difference for head in model.heads[layer]]
            strongest = max(range(len(heads)), key=heads.__getitem__)
            cells.append(f"{interval.difference:.4f} ({interval.low:.4f} to {interval.high:.4f})")
            cells.append(f"{strongest}: {heads[strongest]:.4f}")
        rows.append((f"layer {layer}", *cells))
    columns = [column for model in importances for column in (_short(model.name), "strongest head")]
    return ("layer", *columns), rows
