"""The page of the conflicts between models: what merging them would cancel, what to do about it, and what was kept."""

from collections.abc import Iterator

import numpy as np

from posttrain.merge.conflicts import RESOLUTIONS, ConflictReport
from posttrain.merge.recommendation import recommend, warnings_of
from posttrain.report.charts.curve import CurveStyle, compared_curves
from posttrain.report.formatting import percent_text
from posttrain.report.section import Block, Fold, Page, Section, Table, Text, Tile, blocks
from posttrain.tune.merges.validation import Validation
from posttrain.tune.merges.validation_report import validation_section

_PAIRS = (
    "Cosine between task vectors: 0 where they have nothing in common, below −0.5 where one undoes the other. Signs of "
    "unrelated vectors oppose in half of the weights; the next column counts a weight by how much both changed it."
)

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


def merge_page(report: ConflictReport, validation: Validation | None = None) -> Page:
    """Returns the page.

    Args:
        report: the conflicts.
        validation: what the merged model kept, where it was measured.
    """
    method, reason = recommend(report)
    name = method.replace("_", " ") if method != "ties" else "TIES"
    sentence = f"Recommended: {name}, as {reason}."
    sections = [
        _advice(report, sentence),
        *([validation_section(validation)] if validation else []),
        _pairs(report),
        Section("Layers", blocks(_layer_charts(report), _layers(report))),
        _resolutions(report),
    ]
    return Page("Conflicts between models", "merge", sentence, _headline(report), sections)


def _advice(report: ConflictReport, sentence: str) -> Section:
    caption = (
        f"{', '.join(report.models)}, each compared with the base {report.base}. A task vector is what training "
        "changed: the model's weights minus the base's."
    )
    warnings = (Text(line, "note") for line in warnings_of(report))
    return Section("Advice", [Text(sentence, "verdict"), *warnings, Text(caption, "caption")])


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


def _pairs(report: ConflictReport) -> Section:
    overall = report.overall
    rows = [
        (
            _pair(report, pair),
            f"{overall.cosine(*pair):.3f}",
            percent_text(overall.opposed_share(*pair)),
            percent_text(overall.opposed_weight_share(*pair)),
        )
        for pair in report.pairs
    ]
    norms = [
        (_short(name), f"{overall.norm_ratio(model):.4f}", f"{overall.weight_cosine(model):.4f}")
        for model, name in enumerate(report.models)
    ]
    columns = ("pair", "cosine", "opposed signs", "of the weight")
    norm_columns = ("model", "task vector's norm by the base's", "cosine of the weights with the base's")
    tables = (
        Table(columns, rows, name="Pairs of models"),
        Table(norm_columns, norms, name="Norms of the task vectors"),
    )
    return Section.of("Pairs", _PAIRS, tables if rows else None, empty="One model has nothing to conflict with.")


def _resolutions(report: ConflictReport) -> Section:
    rows = []
    for resolution in RESOLUTIONS:
        shares = [percent_text(report.overall.kept_share(resolution, model)) for model in range(len(report.models))]
        rows.append((_METHODS[resolution], *shares))
    caption = (
        "What each way to resolve conflicts keeps of each model's task vector: the coefficient of the task vector in "
        "the merged one. Average is the mean of the task vectors; zero leaves the base's weight where any two signs "
        "oppose; largest magnitude takes the largest change there, and the average elsewhere; TIES trims each task "
        "vector to its largest fifth, elects signs and averages what agrees."
    )
    table = Table(("resolution", *map(_short, report.models)), rows, name="Resolutions")
    return Section("Resolutions", [Text(caption, "caption"), table, Fold("How to choose one", [_commands(report)])])


def _commands(report: ConflictReport) -> Table:
    rows = [
        (_METHODS[resolution], command)
        for resolution, command in _COMMANDS.items()
        if len(report.models) == 2 or not command.startswith(_PAIR_ONLY)
    ]
    return Table(("resolution", "options of posttrain merge"), rows, name="How to choose one")


def _layer_charts(report: ConflictReport) -> Iterator[Block | None]:
    # What stands in no layer, as the embeddings do, is in the table alone.
    layers = [sums for name, sums in report.layers.items() if name.startswith("layer ")]
    style = CurveStyle("{:.3f}".format, mean=False)
    for measure, title in (
        ("opposed_weight_share", "Share of the weight whose signs oppose"),
        ("cosine", "Cosine between the task vectors"),
    ):
        values = [[getattr(sums, measure)(*pair) for sums in layers] for pair in report.pairs]
        lines = [
            (_pair(report, pair), np.arange(len(layers), dtype=np.float64), np.array(line))
            for pair, line in zip(report.pairs, values, strict=True)
        ]
        yield compared_curves(lines, title, style, axis="layer")


def _layers(report: ConflictReport) -> Fold:
    rows = [
        (
            layer,
            percent_text(sums.interference),
            *(f"{sums.norm_ratio(model):.4f}" for model in range(len(report.models))),
        )
        for layer, sums in report.layers.items()
    ]
    columns = ("layer", "cancels", *(f"norm of {_short(name)}" for name in report.models))
    return Fold("Layers in numbers", [Table(columns, rows, name="Layers in numbers")])
