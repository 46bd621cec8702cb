"""``posttrain data report``: a version's quality, and what changed since another."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.data.stored import VersionArgument, opened_store, stored_version
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, print_json
from posttrain.data.quality_report.drift import drift
from posttrain.data.quality_report.stored import profile_of
from posttrain.store.errors import UserError


def report(
    version: VersionArgument,
    out: Annotated[Path, typer.Argument(help="The page to write.")] = Path("data-report.html"),
    since: Annotated[str | None, typer.Option(help="An older version: what drifted from it.")] = None,
    embedder: Annotated[
        str | None, typer.Option(help="Compare inputs by a sentence model, such as minilm, not by n-grams.")
    ] = None,
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """One self-contained page about a version: counts, lengths, balance, duplicates, rejections, drift."""
    if not json and not out.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=str(out.parent), fix="make it first")
    embed = None
    if embedder is not None:
        from posttrain.models.embedder import Embedder

        embed = Embedder.load(embedder).embed
    with opened_store(workspace) as store:
        profile = profile_of(stored_version(store, version))
        older = profile_of(stored_version(store, since)) if since else None
    change = drift(older, profile, embed, embedder=embedder or "") if older else None
    if json:
        print_json({"profile": profile.to_json(), "drift": change.to_json() if change else None})
        return
    from posttrain.web.data_report import write_data_report

    write_data_report(out, profile, change, heading=version, since=since or "")
    console.print(f"wrote {out}", markup=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(report)
