"""``posttrain report``: writes one self-contained page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import print_line
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.store.errors import UserError
from posttrain.train.standalone import METRICS

_PAGE = "report.html"


def report(
    out: Annotated[Path, typer.Argument(help="The page; or the folder of a training, which gets its page.")] = Path(
        _PAGE
    ),
    training: Annotated[
        list[Path] | None,
        typer.Option(help="Report on a training instead: a folder of `posttrain train --out`. Several are compared."),
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Write a report on the loop, or on trainings, as one HTML page that works offline."""
    from posttrain.web.loop_view import MOST_COMPARED
    from posttrain.web.page import check_page_file

    if not training and (out / METRICS).is_file():
        training, out = [out], out / _PAGE
    if training and len(training) > MOST_COMPARED:
        what = f"{len(training)} trainings are more than a page compares"
        raise UserError(what, where="--training", fix=f"name at most {MOST_COMPARED}")
    if not training and not out.suffix and not out.exists():
        raise UserError("there is no such folder", where=str(out), fix=f"name a training's folder, or a page: {_PAGE}")
    # Before the workspace is read: a long report must not fail at its last step.
    check_page_file(out)
    if training:
        _of_trainings(training, out)
    else:
        _of_workspace(workspace, out)
    print_line(f"wrote {out}")


def _of_trainings(folders: Sequence[Path], out: Path) -> None:
    from dataclasses import replace

    from posttrain.train.curves import read_training_folder
    from posttrain.train.report import comparison_page, training_page, unique_names
    from posttrain.web.page import write_page

    read = [read_training_folder(folder) for folder in folders]
    names = unique_names([training.name for training in read])
    trainings = [replace(training, name=name) for training, name in zip(read, names, strict=True)]
    page = training_page(trainings[0]) if len(trainings) == 1 else comparison_page(trainings)
    write_page(out, lambda detail: page)


def _of_workspace(workspace: Path, out: Path) -> None:
    from posttrain.web.loop_report import write_report

    with open_workspace(workspace) as (store, config):
        write_report(out, store, config)
