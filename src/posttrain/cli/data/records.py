"""``posttrain data show``, ``why``, ``export`` and ``report``: the records of a version."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from posttrain.cli.data.versions import added_kinds, kinds_text
from posttrain.cli.output import (
    JsonOption,
    input_preview,
    one_line,
    print_json,
    print_line,
    print_records,
    print_rejections,
    print_table,
)
from posttrain.cli.workspace import CURRENT_FOLDER, VersionArgument, WorkspaceOption, open_store, open_version
from posttrain.data.report.drift import measure_drift
from posttrain.data.report.profile import profile_version
from posttrain.data.versions.export import export_file as export_records
from posttrain.data.versions.export import export_folder
from posttrain.data.versions.history import record_histories
from posttrain.data.versions.version import Version
from posttrain.store.errors import UserError
from posttrain.store.files import check_new_file
from posttrain.store.message import counted
from posttrain.store.workspace import Workspace


def show(
    version: VersionArgument,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    rejected: Annotated[bool, typer.Option("--rejected", help="Show rejected records and their reasons.")] = False,
    step: Annotated[str | None, typer.Option(help="With --rejected: only this step.")] = None,
    suspect: Annotated[
        bool, typer.Option("--suspect", help="Show the labels that are likely wrong, with the likelier ones.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(help="With --suspect: also write all of them to a CSV for `posttrain label import`.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Only this split.")] = None,
    limit: Annotated[int, typer.Option(help="Most rows to show.", min=0)] = 20,
    json: JsonOption = False,
) -> None:
    """Show a version's funnel and records, the records that were rejected, or labels that are likely wrong."""
    if suspect and rejected:
        raise UserError("rejected records are not judged", where="--suspect", fix="leave out --rejected")
    if export is not None and not suspect:
        raise UserError("only suspects are written", where="--export", fix="add --suspect, or posttrain data export")
    if step is not None and not rejected:
        raise UserError("only what was rejected has a step", where="--step", fix="add --rejected")
    with open_store(workspace) as store:
        stored = open_version(store, version)
        if split is not None and split not in stored.splits:
            raise UserError(f"there is no split `{split}`", where="--split", fix=f"one of {', '.join(stored.splits)}")
        if step is not None and step not in (steps := {entry["step"] for entry in stored.meta["funnel"]}):
            names = ", ".join(sorted(steps - {"read", "kept"})) or "none"
            raise UserError(f"no step `{step}` rejected anything", where="--step", fix=f"those that did: {names}")
        if suspect:
            _show_suspects(stored.records(split), export, limit, json)
            return
        tables = _rejected_tables(stored, step) if rejected else stored.tables(split)
        rows, count = _first_rows(tables, limit)
        added = added_kinds(store, stored.id)
    if json:
        print_json({**stored.meta, "added": added, "rejected" if rejected else "records": rows})
        return
    print_table(
        "", ["step", "reason", "records"], [[e["step"], e["reason"], e["count"]] for e in stored.meta["funnel"]]
    )
    if added:
        print_line(f"added: {kinds_text(added)}")
    show_rows = print_rejections if rejected else print_records
    show_rows(f"{len(rows)} of {counted(count, 'record')}", rows)


def _show_suspects(records: pa.Table, export: Path | None, limit: int, json: bool) -> None:
    from posttrain.inspect.suspect_labels import export_suspects, find_suspects

    if export is not None:
        check_new_file(export, [".csv"])
    suspects = find_suspects(records)
    if export is not None:
        export_suspects(suspects, export)
    if json:
        print_json({"records": records.num_rows, "suspects": [suspect.to_json() for suspect in suspects]})
        return
    rows = [
        [each.id, one_line(each.input), each.given, each.suggested, each.confidence, f"{each.source}:{each.line}"]
        for each in suspects[:limit]
    ]
    title = f"{len(rows)} of {len(suspects):,} likely label errors in {counted(records.num_rows, 'record')}"
    print_table(title, ["id", "input", "given", "suggested", "confidence", "where"], rows)
    if export is not None:
        print_line(f"wrote {export}; fill in its column `label`, or import it as it is to decide on the pages:")
        print_line(f"posttrain label import {export} --batch suspects")


def _rejected_tables(version: Version, step: str | None) -> Iterator[pa.Table]:
    for table in version.rejected():
        yield table if step is None else table.filter(pa.compute.equal(table["step"], step))


def _first_rows(tables: Iterator[pa.Table], limit: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the first rows, and the number of all rows."""
    # Table by table: a version may not fit into memory.
    rows: list[dict[str, Any]] = []
    count = 0
    for table in tables:
        rows += table.slice(0, max(0, limit - len(rows))).to_pylist()
        count += table.num_rows
    return rows, count


def why(
    record: Annotated[str, typer.Argument(help="A record's id, or its beginning.")],
    version: Annotated[
        str | None, typer.Option(help="Only in this version; by default the latest of each dataset.")
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Show a record's history: where it was read, what steps changed, why it was kept or rejected."""
    if len(record) < 4:
        raise UserError(f"`{record}` is too short", fix="give at least four characters of the id")
    with open_store(workspace) as store:
        versions = {version: open_version(store, version)} if version else _last_versions(store)
        entries: list[dict[str, Any]] = [
            {"version": name, "record": history.record, "split": history.split, "events": history.events}
            for name, stored in versions.items()
            for history in record_histories(stored, record)
        ]
    if not entries:
        where = version or "the last version of any dataset"
        raise UserError(f"no record of {where} is called `{record}`", fix="posttrain data show VERSION lists them")
    if json:
        print_json(entries)
        return
    for number, (names, history) in enumerate(_merge_versions(entries)):
        if number:
            print_line("")
        print_line(f"{history['record']['id']} in {', '.join(names)}: {input_preview(history['record'])}")
        for event in history["events"]:
            print_line(f"  {event['step']:<14}{event['what']}")


def _merge_versions(entries: list[dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
    """Merges equal histories of several versions, with the versions' names."""
    merged: list[tuple[list[str], dict[str, Any]]] = []
    for entry in entries:
        history = {name: value for name, value in entry.items() if name != "version"}
        # Compared one by one, as histories cannot be hashed; a record is in few versions.
        for versions, other in merged:
            if history == other:
                versions.append(entry["version"])
                break
        else:
            merged.append(([entry["version"]], history))
    return merged


def _last_versions(store: Workspace) -> dict[str, Version]:
    # Names come oldest first: the last of each stays.
    last = {named.name: named for named in store.metadata.names()}
    return {named.text: Version.open(store.artifacts, named.artifact_id) for named in last.values()}


def export(
    version: VersionArgument,
    file: Annotated[Path, typer.Argument(help=".jsonl, .csv, .tsv or .parquet; a folder for Hugging Face datasets.")],
    split: Annotated[str | None, typer.Option(help="Only this split.")] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Write a version's records to a new file, or to a folder that `datasets.load_from_disk` reads."""
    with open_store(workspace) as store:
        stored = open_version(store, version)
        if split is not None and split not in stored.splits:
            raise UserError(f"there is no split `{split}`", where="--split", fix=f"one of {', '.join(stored.splits)}")
        if file.suffix:
            records = stored.records(split)
            export_records(records, file)
            count = records.num_rows
        else:
            names = [split] if split else [name for name in stored.splits if stored.count(name)]
            count = export_folder({name: stored.records(name) for name in names}, file)
    print_line(f"wrote {counted(count, 'record')} to {file}")


def report(
    version: VersionArgument,
    out: Annotated[Path, typer.Argument(help="The page to write.")] = Path("data-report.html"),
    since: Annotated[str | None, typer.Option(help="An older version to measure the drift from.")] = None,
    embedder: Annotated[
        str | None, typer.Option(help="Compare inputs by a sentence model such as minilm instead of n-grams.")
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
    from posttrain.data.report.page import dataset_page
    from posttrain.web.page import write_page

    write_page(out, lambda detail: dataset_page(profile, change, heading=version, since=since or ""))
    print_line(f"wrote {out}")
