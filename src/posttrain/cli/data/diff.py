"""``posttrain data diff``: what lies between two versions."""

import typer

from posttrain.cli.data.stored import (
    RECORD_COLUMNS,
    REJECTION_COLUMNS,
    VersionArgument,
    opened_store,
    shown_record,
    shown_rejection,
    stored_version,
)
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, print_json, print_table
from posttrain.data.difference import difference


def diff(
    older: VersionArgument, newer: VersionArgument, workspace: WorkspaceOption = HERE, json: JsonOption = False
) -> None:
    """What came and what went between two versions, and why."""
    with opened_store(workspace) as store:
        found = difference(stored_version(store, older), stored_version(store, newer))
    if json:
        print_json({name: getattr(found, name).to_pylist() for name in ("came", "went", "changed")})
        return
    console.print(f"{found.came.num_rows} came, {found.went.num_rows} went, {found.changed.num_rows} changed")
    print_table("came", RECORD_COLUMNS, [shown_record(row) for row in found.came.slice(0, _ROWS).to_pylist()])
    print_table("went", REJECTION_COLUMNS, [shown_rejection(row) for row in found.went.slice(0, _ROWS).to_pylist()])
    changed = [
        [row["input_id"], row["before"], row["after"], f"{row['source']}:{row['line']}"]
        for row in found.changed.slice(0, _ROWS).to_pylist()
    ]
    print_table("changed", ["input", "before", "after", "where"], changed)


_ROWS = 50


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(diff)
