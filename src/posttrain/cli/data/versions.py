"""``posttrain data list``, ``log`` and ``tag``: versions and their history."""

from typing import Annotated, Any

import typer

from posttrain.cli.data.stored import VersionArgument, opened_store
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, print_json, print_table
from posttrain.store.errors import UserError
from posttrain.store.records import Named
from posttrain.store.workspace import Workspace


def list_versions(workspace: WorkspaceOption = HERE, json: JsonOption = False) -> None:
    """All dataset versions."""
    with opened_store(workspace) as store:
        rows = [_row(store, named) for named in store.metadata.names()]
    if json:
        print_json(rows)
    else:
        print_table("", _COLUMNS, [[row[column] for column in _COLUMNS] for row in rows])


def log(
    name: Annotated[str, typer.Argument(help="A dataset's name.")],
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """A dataset's versions, newest first: what came, what went, by which steps, and why."""
    with opened_store(workspace) as store:
        entries = [_entry(store, named) for named in reversed(store.metadata.names(name))]
    if not entries:
        raise UserError(f"there is no dataset `{name}`", fix="posttrain data list")
    if json:
        print_json(entries)
        return
    for entry in entries:
        tags = f"  ({', '.join(entry['tags'])})" if entry["tags"] else ""
        _line(f"{entry['version']}{tags}  {entry['id']}  {entry['created']}")
        if entry["note"]:
            _line(f"  {entry['note']}")
        _line(f"  {entry['records']:,} records" + _grown(entry))
        for source in entry["came"]:
            _line(f"  + {source['records']:,} read from {source['name']}")
        _line(f"  steps: {', '.join(entry['steps']) or 'none'}")


def tag(
    version: VersionArgument,
    word: Annotated[str, typer.Argument(help="Such as production.")],
    workspace: WorkspaceOption = HERE,
) -> None:
    """Have NAME@WORD lead to a version from now on."""
    from posttrain.data.versions.semantic_version import check_tag

    check_tag(word)
    with opened_store(workspace, write=True) as store:
        id = store.metadata.named(version) or store.metadata.resolve(version)
        name = version.partition("@")[0]
        found = [one for one in store.metadata.names() if one.artifact_id == id]
        named = next((one for one in found if one.name == name), found[0] if found else None)
        if named is None:
            raise UserError(f"`{version}` has no name", fix="posttrain data list")
        store.metadata.tag(named.name, named.version, word)
    console.print(f"{named.name}@{word} is {named.text}", markup=False)


_COLUMNS = ["version", "records", "rejected", "id", "parent", "tags"]


def _row(store: Workspace, named: Named) -> dict[str, Any]:
    artifact = store.metadata.artifact(named.artifact_id)
    counts = artifact.meta["counts"] if artifact else {}
    return {
        "version": named.text,
        "records": counts.get("records"),
        "rejected": counts.get("rejected"),
        "id": named.artifact_id,
        "parent": named.parent,
        "tags": " ".join(named.tags),
        "created": named.created_at.isoformat(timespec="seconds"),
    }


def _entry(store: Workspace, named: Named) -> dict[str, Any]:
    from posttrain.data.versions.stored_version import Version

    meta = Version.open(store.artifacts, named.artifact_id).meta
    before: dict[str, str] = {}
    parent_records = None
    if named.parent:
        parent = Version.open(store.artifacts, named.parent).meta
        parent_records = parent["counts"]["records"]
        before = {source["name"]: source["digest"] for source in parent.get("sources", [])}
    came = [
        {"name": source["name"], "records": source["records"]}
        for source in meta.get("sources", [])
        if before.get(source["name"]) != source["digest"]
    ]
    steps = [next(iter(step)) for step in meta["recipe"]["steps"]] if "recipe" in meta else meta.get("filters", [])
    row = _row(store, named)
    return {**row, "tags": list(named.tags), "note": named.note, "parent_records": parent_records, "came": came,
            "steps": steps}  # fmt: skip


def _grown(entry: dict[str, Any]) -> str:
    if entry["parent_records"] is None:
        return ""
    return f", {entry['records'] - entry['parent_records']:+,} on {entry['parent']}"


def _line(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command(name="list")(list_versions)
    app.command()(log)
    app.command()(tag)
