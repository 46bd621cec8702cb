"""``posttrain verify``: compares everything that is stored with its checksums; rebuilds a lost database."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.output import JsonOption, print_json, print_line
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, store_config
from posttrain.store.config import StoreConfig
from posttrain.store.errors import UserError
from posttrain.store.message import counted

if TYPE_CHECKING:
    from posttrain.inspect.verify import Verification


def verify(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    quick: Annotated[bool, typer.Option("--quick", help="Compare sizes only; read no large file.")] = False,
    rebuild: Annotated[
        bool,
        typer.Option("--rebuild", help="Rebuild a lost or damaged database from its journal and the artifacts."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compare everything that is stored with its checksums; rebuild a lost database.

    Prints a line for each finding and exits with 1 if there is one.
    """
    from posttrain.inspect.verify import verify

    if rebuild and (quick or json):
        raise UserError("--rebuild goes with no other option", fix="posttrain verify --rebuild, then posttrain verify")
    with store_config(workspace) as config:
        if rebuild:
            _rebuild(workspace, config)
            return
        result = verify(workspace, config, quick=quick)
    if json:
        print_json({"findings": [asdict(finding) for finding in result.findings], "checked": result.checked})
    else:
        for finding in result.findings:
            print_line(finding.line)
        if not result.findings:
            print_line(_summary(result, quick))
    if result.findings:
        raise typer.Exit(1)


def _summary(result: "Verification", quick: bool) -> str:
    checked = result.checked
    if quick:
        return (
            f"no damage: {counted(checked['artifacts'], 'artifact')} by their sizes, {counted(checked['rows'], 'row')}"
        )
    return (
        f"no damage: {counted(checked['artifacts'], 'artifact')} ({checked['bytes'] / 1e6:,.1f} MB), "
        f"{counted(checked['rows'], 'row')}, "
        f"{checked['score_chunks']:,} score chunks, {checked['feedback_entries']:,} feedback entries"
    )


def _rebuild(root: Path, config: StoreConfig) -> None:
    from posttrain.store.rebuild import rebuild_database

    result = rebuild_database(root, config)
    if result is None:
        print_line("the database is healthy: nothing to rebuild")
        return
    counts = ", ".join(f"{count:,} {table.replace('_', ' ')}" for table, count in result.rows.items() if count)
    print_line(f"rebuilt {result.location}: {counts or 'no rows'}")
    if result.replaced:
        print_line(f"the damaged file is {result.replaced}")
    for line in result.unknown:
        print_line(f"unknown: {line}")
