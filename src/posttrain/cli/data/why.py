"""``posttrain data why``: one record's whole story."""

from typing import Annotated, Any

import typer

from posttrain.cli.data.stored import opened_store, shown_input, stored_version
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, print_json
from posttrain.data.versions.stored_version import Version
from posttrain.data.versions.story import stories
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace


def why(
    record: Annotated[str, typer.Argument(help="A record's id, or its beginning.")],
    version: Annotated[str | None, typer.Option(help="In this version alone; without it in the last of each.")] = None,
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """What became of a record: where it was read, what steps did to it, and why it stayed or went."""
    if len(record) < 4:
        raise UserError(f"`{record}` is too short", fix="give at least four characters of the id")
    with opened_store(workspace) as store:
        versions = {version: stored_version(store, version)} if version else _last_versions(store)
        found: list[dict[str, Any]] = [
            {"version": name, "record": story.record, "split": story.split, "events": story.events}
            for name, one in versions.items()
            for story in stories(one, record)
        ]
    if not found:
        where = version or "the last version of any dataset"
        raise UserError(f"no record of {where} is called `{record}`", fix="posttrain data show VERSION lists them")
    if json:
        print_json(found)
        return
    for number, (versions_of, story) in enumerate(_told_once(found)):
        if number:
            console.print()
        _line(f"{story['record']['id']} in {', '.join(versions_of)}: {shown_input(story['record'])}")
        for event in story["events"]:
            _line(f"  {event['step']:<14}{event['what']}")


def _told_once(found: list[dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
    """The stories, those that are the same in several versions once, with the versions' names."""
    once: list[tuple[list[str], dict[str, Any]]] = []
    for story in found:
        rest = {name: value for name, value in story.items() if name != "version"}
        for versions, other in once:
            if rest == other:
                versions.append(story["version"])
                break
        else:
            once.append(([story["version"]], rest))
    return once


def _last_versions(store: Workspace) -> dict[str, Version]:
    last = {named.name: named for named in store.metadata.names()}
    return {named.text: Version.open(store.artifacts, named.artifact_id) for named in last.values()}


def _line(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(why)
