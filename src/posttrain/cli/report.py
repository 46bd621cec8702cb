"""``posttrain report``: writes one self-contained page."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import print_line
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.store.errors import UserError


def report(
    out: Annotated[Path, typer.Argument(help="The page.")] = Path("report.html"),
    training: Annotated[
        Path | None, typer.Option(help="Report on a training instead: a folder of `posttrain train --out`.")
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Write one self-contained HTML page that works offline."""
    if not out.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=str(out.parent), fix="make it first")
    # Checked before the workspace is read: a long report must not fail at its last step.
    if out.is_dir():
        raise UserError("is a folder", where=str(out), fix=f"name a file, such as {out / 'report.html'}")
    if out.suffix == ".svg":
        fix = "name a file that ends in .html; below each of its charts, Data has a button that saves the chart as SVG"
        raise UserError("a report is HTML", where=str(out), fix=fix)
    if training is not None:
        _of_training(training, out)
    else:
        _of_workspace(workspace, out)
    print_line(f"wrote {out}")


def _of_training(folder: Path, out: Path) -> None:
    from posttrain.web.report import write_training
    from posttrain.web.training_reader import read_training_folder

    write_training(read_training_folder(folder), out)


def _of_workspace(workspace: Path, out: Path) -> None:
    from posttrain.web.report import write_report
    from posttrain.web.report_reader import read_report

    with open_workspace(workspace) as (store, config):
        content = read_report(store, config)
    write_report(content, out)
