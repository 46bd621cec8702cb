"""``posttrain data show``, ``why``, ``export`` and ``report``: the records of a version."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from posttrain.cli.output import (
    JsonOption,
    console,
    input_preview,
    print_json,
    print_records,
    print_rejections,
    print_table,
)
from posttrain.cli.workspace import CURRENT_FOLDER, VersionArgument, WorkspaceOption, open_store, open_version
from posttrain.data.report.drift import measure_drift
from posttrain.data.report.profile import profile_version
from posttrain.data.versions.export import export_file as export_records
from posttrain.data.versions.export import export_folder
from posttrain.data.versions.record_history import record_histories
from posttrain.data.versions.version import Version
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace


def show(
    version: VersionArgument,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    rejected: Annotated[bool, typer.Option("--rejected", help="What its making took out, and why.")] = False,
    step: Annotated[str | None, typer.Option(help="With --rejected: by this step alone.")] = None,
    split: Annotated[str | None, typer.Option(help="Of this side alone.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many rows.", min=0)] = 20,
    json: JsonOption = False,
) -> None:
    """Show a version's funnel and records, or the records that were rejected."""
    if step is not None and not rejected:
        raise UserError("only what was rejected has a step", where="--step", fix="add --rejected")
    with open_store(workspace) as store:
        found = open_version(store, version)
        if split is not None and split not in found.splits:
            raise UserError(f"there is no split `{split}`", where="--split", fix=f"one of {', '.join(found.splits)}")
        if step is not None and step not in (steps := {entry["step"] for entry in found.meta["funnel"]}):
            known = ", ".join(sorted(steps - {"read", "kept"})) or "none"
            raise UserError(f"no step `{step}` rejected anything", where="--step", fix=f"those that did: {known}")
        tables = _rejected_tables(found, step) if rejected else found.tables(split)
        rows, count = _first_rows(tables, limit)
    if json:
        print_json({**found.meta, "rejected" if rejected else "records": rows})
        return
    print_table("", ["step", "reason", "records"], [[e["step"], e["reason"], e["count"]] for e in found.meta["funnel"]])
    show_rows = print_rejections if rejected else print_records
    show_rows(f"{len(rows)} of {count} records", rows)


def _rejected_tables(version: Version, step: str | None) -> Iterator[pa.Table]:
    for table in version.rejected():
        yield table if step is None else table.filter(pa.compute.equal(table["step"], step))


def _first_rows(tables: Iterator[pa.Table], limit: int) -> tuple[list[dict[str, Any]], int]:
    """The first rows, and how many there are."""
    rows: list[dict[str, Any]] = []
    count = 0
    for table in tables:
        rows += table.slice(0, max(0, limit - len(rows))).to_pylist()
        count += table.num_rows
    return rows, count


def why(
    record: Annotated[str, typer.Argument(help="A record's id, or its beginning.")],
    version: Annotated[str | None, typer.Option(help="In this version alone; without it in the last of each.")] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Show a record's history: where it was read, what steps changed, why it was kept or rejected."""
    if len(record) < 4:
        raise UserError(f"`{record}` is too short", fix="give at least four characters of the id")
    with open_store(workspace) as store:
        versions = {version: open_version(store, version)} if version else _last_versions(store)
        found: list[dict[str, Any]] = [
            {"version": name, "record": story.record, "split": story.split, "events": story.events}
            for name, one in versions.items()
            for story in record_histories(one, record)
        ]
    if not found:
        where = version or "the last version of any dataset"
        raise UserError(f"no record of {where} is called `{record}`", fix="posttrain data show VERSION lists them")
    if json:
        print_json(found)
        return
    for number, (versions_of, story) in enumerate(_merge_versions(found)):
        if number:
            console.print()
        _print_why(f"{story['record']['id']} in {', '.join(versions_of)}: {input_preview(story['record'])}")
        for event in story["events"]:
            _print_why(f"  {event['step']:<14}{event['what']}")


def _merge_versions(found: list[dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
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


def _print_why(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def export(
    version: VersionArgument,
    file: Annotated[Path, typer.Argument(help=".jsonl, .csv, .tsv or .parquet; a folder for Hugging Face datasets.")],
    split: Annotated[str | None, typer.Option(help="This side alone.")] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Write a version's records to a new file, or to a folder that `datasets.load_from_disk` reads."""
    with open_store(workspace) as store:
        found = open_version(store, version)
        if split is not None and split not in found.splits:
            raise UserError(f"there is no split `{split}`", where="--split", fix=f"one of {', '.join(found.splits)}")
        if file.suffix:
            records = found.records(split)
            export_records(records, file)
            count = records.num_rows
        else:
            names = [split] if split else [name for name in found.splits if found.count(name)]
            count = export_folder({name: found.records(name) for name in names}, file)
    console.print(f"wrote {count} records to {file}", markup=False, soft_wrap=True)


def report(
    version: VersionArgument,
    out: Annotated[Path, typer.Argument(help="The page to write.")] = Path("data-report.html"),
    since: Annotated[str | None, typer.Option(help="An older version: what drifted from it.")] = None,
    embedder: Annotated[
        str | None, typer.Option(help="Compare inputs by a sentence model, such as minilm, not by n-grams.")
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Write one self-contained page about a version: counts, lengths, balance, duplicates, drift."""
    if not json and not out.absolute().parent.is_dir():
        raise UserError("there is no such folder", where=str(out.parent), fix="make it first")
    embed = None
    if embedder is not None:
        from posttrain.models.embedder import Embedder

        embed = Embedder.load(embedder).embed
    with open_store(workspace) as store:
        profile = profile_version(open_version(store, version))
        older = profile_version(open_version(store, since)) if since else None
    change = measure_drift(older, profile, embed, embedder=embedder or "") if older else None
    if json:
        print_json({"profile": profile.to_json(), "drift": change.to_json() if change else None})
        return
    from posttrain.web.dataset_report import write_dataset_report

    write_dataset_report(out, profile, change, heading=version, since=since or "")
    console.print(f"wrote {out}", markup=False, soft_wrap=True)
