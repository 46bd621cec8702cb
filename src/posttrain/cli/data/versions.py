"""``posttrain data list``, ``log``, ``tag``, ``diff`` and ``gc``: versions, their history and what can be removed."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from posttrain.cli.output import (
    JsonOption,
    print_json,
    print_line,
    print_records,
    print_rejections,
    print_table,
)
from posttrain.cli.workspace import CURRENT_FOLDER, VersionArgument, WorkspaceOption, open_store, open_version
from posttrain.data.records.provenance import RECORD_KINDS
from posttrain.data.versions.history import count_kinds, diff_versions, increment_kinds
from posttrain.data.versions.named_build import check_tag, find_garbage, remove_garbage
from posttrain.store.errors import UserError
from posttrain.store.message import counted
from posttrain.store.rows import NamedVersion
from posttrain.store.workspace import Workspace

_LIST_COLUMNS = ["version", "records", "added", "rejected", "id", "parent", "tags"]

_DIFF_ROWS = 50

_LARGE = 100_000  # records; `list` does not read versions that are larger, as it lists many


def list_versions(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """List all dataset versions; of those up to 100,000 records what they added to their parent, by kind."""
    with open_store(workspace) as store:
        rows = [_version_row(store, named, is_list=True) for named in store.metadata.names()]
    if json:
        print_json(rows)
    else:
        cells = [{**row, "added": kinds_text(row["added"])} for row in rows]
        print_table("", _LIST_COLUMNS, [[row[column] for column in _LIST_COLUMNS] for row in cells])


def log(
    name: Annotated[str, typer.Argument(help="A dataset's name.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Show a dataset's versions, newest first: records added and removed, by which steps, and why."""
    with open_store(workspace) as store:
        entries = [_log_entry(store, named) for named in reversed(store.metadata.names(name))]
    if not entries:
        raise UserError(f"there is no dataset `{name}`", fix="posttrain data list")
    if json:
        print_json(entries)
        return
    for entry in entries:
        tags = f"  ({', '.join(entry['tags'])})" if entry["tags"] else ""
        print_line(f"{entry['version']}{tags}  {entry['id']}  {entry['created']}")
        if entry["note"]:
            print_line(f"  {entry['note']}")
        print_line(f"  {counted(entry['records'], 'record')}" + _growth_text(entry))
        if entry["added"]:
            print_line(f"  added: {kinds_text(entry['added'])}")
        for source in entry["came"]:
            print_line(f"  + {source['records']:,} read from {source['name']}")
        print_line(f"  steps: {', '.join(entry['steps']) or 'none'}")


def tag(
    version: VersionArgument,
    word: Annotated[str, typer.Argument(help="Such as production.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Make NAME@WORD refer to a version."""
    check_tag(word)
    with open_store(workspace, write=True) as store:
        id = store.metadata.named(version) or store.metadata.resolve(version)
        name = version.partition("@")[0]
        names = [each for each in store.metadata.names() if each.artifact_id == id]
        # Several datasets may share an artifact: the tag goes to the one that the user wrote.
        named = next((each for each in names if each.name == name), names[0] if names else None)
        if named is None:
            raise UserError(f"`{version}` has no name", fix="posttrain data list")
        store.metadata.tag(named.name, named.version, word)
    print_line(f"{named.name}@{word} is {named.text}")


def kinds_text(kinds: Mapping[str, int] | None) -> str:
    """Returns counts by kind as text, such as ``3 from files, 12 labelled``; empty without any."""
    return ", ".join(f"{count:,} {RECORD_KINDS[kind]}" for kind, count in (kinds or {}).items())


def added_kinds(store: Workspace, id: str) -> dict[str, int] | None:
    """Counts by kind the records that a dataset version has and its parent does not; None if the parent is gone."""
    from posttrain.data.versions.version import Version

    version = Version.open(store.artifacts, id)
    parent = version.meta.get("parent") or next(
        (named.parent for named in store.metadata.names() if named.artifact_id == id), None
    )
    if parent is not None and not store.artifacts.exists(parent):
        return None
    return increment_kinds(version, None if parent is None else Version.open(store.artifacts, parent))


def _version_row(store: Workspace, named: NamedVersion, *, is_list: bool = False) -> dict[str, Any]:
    artifact = store.metadata.artifact(named.artifact_id)
    counts = artifact.meta["counts"] if artifact else {}
    is_counted = not is_list or counts.get("records", 0) <= _LARGE
    return {
        "version": named.text,
        "records": counts.get("records"),
        "added": added_kinds(store, named.artifact_id) if is_counted else None,
        "rejected": counts.get("rejected"),
        "id": named.artifact_id,
        "parent": named.parent,
        "tags": " ".join(named.tags),
        "created": named.created_at.isoformat(timespec="seconds"),
    }


def _log_entry(store: Workspace, named: NamedVersion) -> dict[str, Any]:
    from posttrain.data.versions.version import Version

    meta = Version.open(store.artifacts, named.artifact_id).meta
    before: dict[str, str] = {}
    parent_records = None
    if named.parent:
        parent = Version.open(store.artifacts, named.parent).meta
        parent_records = parent["counts"]["records"]
        before = {source["name"]: source["digest"] for source in parent.get("sources", [])}
    # By content: a file that was added again unchanged brought nothing.
    new_sources = [
        {"name": source["name"], "records": source["records"]}
        for source in meta.get("sources", [])
        if before.get(source["name"]) != source["digest"]
    ]
    # The loop's own sets have no recipe but the names of their filters.
    steps = [next(iter(step)) for step in meta["recipe"]["steps"]] if "recipe" in meta else meta.get("filters", [])
    row = _version_row(store, named)
    return {**row, "tags": list(named.tags), "note": named.note, "parent_records": parent_records, "came": new_sources,
            "steps": steps}  # fmt: skip


def _growth_text(entry: dict[str, Any]) -> str:
    if entry["parent_records"] is None:
        return ""
    return f", {entry['records'] - entry['parent_records']:+,} on {entry['parent']}"


def diff(
    older: VersionArgument,
    newer: VersionArgument,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Show the records added and removed between two versions, and why."""
    with open_store(workspace) as store:
        changes = diff_versions(open_version(store, older), open_version(store, newer))
    if json:
        tables = {"came": changes.added, "went": changes.removed, "changed": changes.changed}
        rows = {name: table.to_pylist() for name, table in tables.items()}
        print_json({**rows, "kinds": {"came": count_kinds([changes.added]), "went": count_kinds([changes.removed])}})
        return
    if not (changes.added.num_rows or changes.removed.num_rows or changes.changed.num_rows):
        print_line("no difference")
        return
    counts = (changes.added.num_rows, changes.removed.num_rows, changes.changed.num_rows)
    print_line("{} added, {} removed, {} changed".format(*counts))
    for name, table in (("added", changes.added), ("removed", changes.removed)):
        if table.num_rows:
            print_line(f"{name}: {kinds_text(count_kinds([table]))}")
    if changes.added.num_rows:
        print_records("added", changes.added.slice(0, _DIFF_ROWS).to_pylist())
    if changes.removed.num_rows:
        print_rejections("removed", changes.removed.slice(0, _DIFF_ROWS).to_pylist())
    changed = [
        [row["input_id"], row["before"], row["after"], f"{row['source']}:{row['line']}"]
        for row in changes.changed.slice(0, _DIFF_ROWS).to_pylist()
    ]
    if changed:
        print_table("changed", ["input", "before", "after", "where"], changed)


def gc(
    keep: Annotated[
        int | None, typer.Option(help="Newest versions of each dataset to keep, besides tagged and used ones.", min=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Remove shards that no version uses; with --keep also old versions."""
    # The lock: a build in progress uses shards that no version names yet.
    with open_store(workspace, write=True) as store, store.lock():
        garbage = find_garbage(store, keep)
        if not dry_run:
            remove_garbage(store, garbage)
    versions = [named.text for named in garbage.versions]
    if json:
        print_json({"versions": versions, "artifacts": list(garbage.artifacts), "bytes": garbage.size})
        return
    verb = "would remove" if dry_run else "removed"
    if versions:
        print_line(f"{verb} {', '.join(versions)}")
    print_line(f"{verb} {len(garbage.artifacts)} artifacts, {garbage.size / 1e6:.1f} MB")
