"""``posttrain label``: batches out, labels in, and what is known about them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, console, print_json, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.loop.label_batches import export_batch, import_batch, label_reports

app = typer.Typer(name="label", help="Export batches to label, and import the labels.", no_args_is_help=True)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="CSV file to write.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Write the batch that the loop waits for, to be filled in elsewhere."""
    with open_workspace(workspace) as (store, config):
        count = export_batch(store, config, file)
    console.print(
        f"wrote {count} records to {file}; fill the label column, then: posttrain label import {file}",
        markup=False,
    )


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="The filled CSV file.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Take a filled batch in; the next run goes on with it."""
    with open_workspace(workspace, write=True) as (store, config):
        filled, asked = import_batch(store, config, file)
    console.print(
        f"{filled} of {asked} labels are in" + ("; now: posttrain run" if filled == asked else ""),
        markup=False,
    )


@app.command()
def report(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """Counts, annotators and agreement with the model, by round."""
    with open_workspace(workspace, checked=False) as (store, _):
        reports = label_reports(store)
    if json:
        print_json(reports)
        return
    columns = ["round", "labels", "classes", "annotators", "champion right", "on the pool"]
    rows = [
        [r["round"], r["labels"], len(r["classes"]), ", ".join(r["annotators"]), r["agreement"], _on_pool(r)]
        for r in reports
    ]
    print_table("", columns, rows)


def _on_pool(report: dict[str, Any]) -> str:
    """The estimate from the records that were drawn at random."""
    found = report["pool_agreement"]
    return f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})" if found else ""
