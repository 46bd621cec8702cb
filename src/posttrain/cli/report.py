"""``posttrain report``: writes one self-contained page."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import print_line
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace


def report(
    out: Annotated[Path, typer.Argument(help="The page.")] = Path("report.html"),
    training: Annotated[
        Path | None, typer.Option(help="Report on a training instead: a folder of `posttrain train --out`.")
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Write a report on the loop as one HTML page that works offline."""
    from posttrain.web.page import check_page_file

    # Before the workspace is read: a long report must not fail at its last step.
    check_page_file(out)
    if training is not None:
        _of_training(training, out)
    else:
        _of_workspace(workspace, out)
    print_line(f"wrote {out}")


def _of_training(folder: Path, out: Path) -> None:
    from posttrain.train.curves import read_training_folder
    from posttrain.train.report import training_page
    from posttrain.web.page import write_page

    training = read_training_folder(folder)
    write_page(out, lambda detail: training_page(training))


def _of_workspace(workspace: Path, out: Path) -> None:
    from posttrain.web.loop_report import write_report

    with open_workspace(workspace) as (store, config):
        write_report(out, store, config)
