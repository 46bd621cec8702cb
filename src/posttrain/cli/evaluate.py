"""``posttrain eval``: measures a model, or an ensemble, on the config's suites."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace

_CURVE_ROWS = 12


def evaluate(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    model: Annotated[
        str | None,
        typer.Option(help="A model's id, or an ensemble's file (docs/ensembles.md); the champion by default."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Measure on all test records, not on the `sample` of a suite.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure a model, the champion by default, or an ensemble of models on the test suites of the config."""
    from posttrain.inspect.evaluation import evaluate_model

    with open_workspace(workspace, write=True) as (store, config):
        result = evaluate_model(store, config, model, full)
    if json:
        print_json(result)
        return
    metrics = [list(entry) for entry in result["metrics"].items()]
    print_table(f"{result['model']} ({result['evaluation']})", ["metric", "value"], metrics)
    for suite, report in result.get("ensemble", {}).items():
        _print_ensemble(suite, report)


def _print_ensemble(suite: str, report: Mapping[str, Any]) -> None:
    columns = ["model", *(name for name in ("weight", "threshold") if name in report["models"][0])]
    rows = [
        [*(row[name] for name in columns), f"{row['accuracy']:.4f}", f"{row['seconds']:.4f}", f"{row['flops']:.3g}"]
        for row in report["models"]
    ]
    metric = report["metric"]
    print_table(f"{suite}: each model alone", [*columns, metric, "s / record", "FLOPs / record"], rows)
    if why := report["fitted"].get("why"):
        print_line(why)
    names = ["threshold", "answered by", metric, "95% interval", "s / record", "s saved", "FLOPs saved"]
    if "curve" in report:
        print_table(f"{suite}: this cascade", names[1:], [_curve_row(report["chosen"])[1:]])
        print_table(f"{suite}: cost and {metric}", names, [_curve_row(point) for point in _spread(report["curve"])])
    elif "chosen" in report:
        point = report["chosen"]
        row = [*_point_row(point), f"{point['flops']:.3g}"]
        print_table(f"{suite}: this gate", [*names[1:5], "FLOPs / record"], [row])


def _curve_row(point: Mapping[str, Any]) -> list[Any]:
    return [
        "last alone" if point.get("threshold") is None else point["threshold"],
        *_point_row(point),
        f"{point['seconds_saved']:.1%}",
        f"{point['flops_saved']:.1%}",
    ]


def _point_row(point: Mapping[str, Any]) -> list[str]:
    return [
        " / ".join(f"{share:.1%}" for share in point["shares"]),
        f"{point['accuracy']:.4f}",
        "" if point["low"] is None else f"{point['low']:.3f} to {point['high']:.3f}",
        f"{point['seconds']:.4f}",
    ]


def _spread(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns up to 12 points of a curve, its ends among them; `--json` has all."""
    count = min(len(points), _CURVE_ROWS)
    step = (len(points) - 1) / max(1, count - 1)
    return [points[round(index * step)] for index in range(count)]
