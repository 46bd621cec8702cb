"""``posttrain data gc``: give back the space of what no version needs."""

from typing import Annotated

import typer

from posttrain.cli.data.stored import opened_store
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, print_json
from posttrain.data.versions.garbage import find_garbage, remove_garbage


def gc(
    keep: Annotated[
        int | None, typer.Option(help="Newest versions of each dataset to keep, besides tagged and used ones.", min=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and let it stay.")] = False,
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """Remove shards that no version holds; with --keep also old versions."""
    with opened_store(workspace, write=True) as store, store.lock():
        garbage = find_garbage(store, keep)
        if not dry_run:
            remove_garbage(store, garbage)
    versions = [named.text for named in garbage.versions]
    if json:
        print_json({"versions": versions, "artifacts": list(garbage.artifacts), "bytes": garbage.size})
        return
    verb = "would remove" if dry_run else "removed"
    if versions:
        console.print(f"{verb} {', '.join(versions)}", markup=False, soft_wrap=True)
    console.print(
        f"{verb} {len(garbage.artifacts)} artifacts, {garbage.size / 1e6:.1f} MB", markup=False, soft_wrap=True
    )


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(gc)
