"""``posttrain label``: exports batches to label, imports the labels, and reports on them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.loop.stages.label import export_batch, import_batch, label_reports

app = typer.Typer(name="label", help="Export batches to label, and import the labels.", no_args_is_help=True)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="CSV file to write.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Write the pending batch to a CSV file, to be filled in elsewhere."""
    with open_workspace(workspace) as (store, config):
        count = export_batch(store, config, file)
    print_line(f"wrote {count} records to {file}; fill the label column, then: posttrain label import {file}")


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="The filled CSV file.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Import a filled batch; the next `posttrain run` resumes with it."""
    with open_workspace(workspace, write=True) as (store, config):
        filled, total = import_batch(store, config, file)
    # A part of the labels may be imported, to be completed later; the round waits until all are in.
    print_line(f"{filled} of {total} labels are in" + ("; now: posttrain run" if filled == total else ""))


@app.command()
def report(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """Show label counts, annotators and agreement with the model, by round."""
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
    """Formats the agreement estimated from the randomly drawn records."""
    estimate = report["pool_agreement"]
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})" if estimate else ""
