"""``posttrain data show``: what a version holds, and what it does not."""

from collections.abc import Iterator
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute
import typer

from posttrain.cli.data.stored import VersionArgument, opened_store, print_records, print_rejections, stored_version
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, print_json, print_table
from posttrain.data.versions.stored_version import Version
from posttrain.store.errors import UserError


def show(
    version: VersionArgument,
    workspace: WorkspaceOption = HERE,
    rejected: Annotated[bool, typer.Option("--rejected", help="What its making took out, and why.")] = False,
    step: Annotated[str | None, typer.Option(help="With --rejected: by this step alone.")] = None,
    split: Annotated[str | None, typer.Option(help="Of this side alone.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many rows.", min=0)] = 20,
    json: JsonOption = False,
) -> None:
    """A version's funnel and records, or what was rejected on the way to it."""
    if step is not None and not rejected:
        raise UserError("only what was rejected has a step", where="--step", fix="add --rejected")
    with opened_store(workspace) as store:
        found = stored_version(store, version)
        if split is not None and split not in found.splits:
            raise UserError(f"there is no split `{split}`", where="--split", fix=f"one of {', '.join(found.splits)}")
        if step is not None and step not in (steps := {entry["step"] for entry in found.meta["funnel"]}):
            known = ", ".join(sorted(steps - {"read", "kept"})) or "none"
            raise UserError(f"no step `{step}` rejected anything", where="--step", fix=f"those that did: {known}")
        tables = _rejected(found, step) if rejected else found.tables(split)
        rows, count = _first(tables, limit)
    if json:
        print_json({**found.meta, "rejected" if rejected else "records": rows})
        return
    print_table("", ["step", "reason", "records"], [[e["step"], e["reason"], e["count"]] for e in found.meta["funnel"]])
    show_rows = print_rejections if rejected else print_records
    show_rows(f"{len(rows)} of {count} records", rows)


def _rejected(version: Version, step: str | None) -> Iterator[pa.Table]:
    for table in version.rejected():
        yield table if step is None else table.filter(pa.compute.equal(table["step"], step))


def _first(tables: Iterator[pa.Table], limit: int) -> tuple[list[dict[str, Any]], int]:
    """The first rows, and how many there are."""
    rows: list[dict[str, Any]] = []
    count = 0
    for table in tables:
        rows += table.slice(0, max(0, limit - len(rows))).to_pylist()
        count += table.num_rows
    return rows, count


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(show)
