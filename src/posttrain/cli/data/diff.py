"""``posttrain data diff``: what lies between two versions."""

import typer

from posttrain.cli.data.stored import VersionArgument, opened_store, print_records, print_rejections, stored_version
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, print_json, print_table
from posttrain.data.versions.difference import difference


def diff(
    older: VersionArgument, newer: VersionArgument, workspace: WorkspaceOption = HERE, json: JsonOption = False
) -> None:
    """What came and what went between two versions, and why."""
    with opened_store(workspace) as store:
        found = difference(stored_version(store, older), stored_version(store, newer))
    if json:
        print_json({name: getattr(found, name).to_pylist() for name in ("came", "went", "changed")})
        return
    if not (found.came.num_rows or found.went.num_rows or found.changed.num_rows):
        console.print("no difference")
        return
    console.print(f"{found.came.num_rows} came, {found.went.num_rows} went, {found.changed.num_rows} changed")
    if found.came.num_rows:
        print_records("came", found.came.slice(0, _ROWS).to_pylist())
    if found.went.num_rows:
        print_rejections("went", found.went.slice(0, _ROWS).to_pylist())
    changed = [
        [row["input_id"], row["before"], row["after"], f"{row['source']}:{row['line']}"]
        for row in found.changed.slice(0, _ROWS).to_pylist()
    ]
    if changed:
        print_table("changed", ["input", "before", "after", "where"], changed)


_ROWS = 50


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(diff)
