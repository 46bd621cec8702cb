"""``posttrain data``: check, add, list, show, diff and export records and dataset versions."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, opened, print_json, print_table
from posttrain.data.check import check as find_problems
from posttrain.data.export import export as export_records
from posttrain.data.version import Dataset, read_dataset
from posttrain.data.version import diff as difference
from posttrain.loop.config import CONFIG_FILE, Config, load_config
from posttrain.loop.stages.collect import with_added_files
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically, writing
from posttrain.store.workspace import Workspace

app = typer.Typer(name="data", help="Records and dataset versions.", no_args_is_help=True)

Version = Annotated[str, typer.Argument(help="name@vN, a name (its last version), or an artifact's id.")]


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Files of records.")],
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """Every problem of the files, with file and line; leaves with 2 if there is one."""
    config = load_config(workspace) if (workspace / CONFIG_FILE).is_file() else None
    columns = config.data.columns if config else None
    labels = config.task.label_set or None if config else None
    unanswered = _pool_files(config, workspace) if config else set()
    problems = []
    for file in files:
        allowed = None if file.resolve() in unanswered else labels
        problems += find_problems(file, columns, allowed, name=str(file), answers=False)
    counts = Counter(problem.kind for problem in problems)
    if json:
        found = [{"file": p.file, "line": p.line, "kind": p.kind, "message": p.message, "fix": p.fix} for p in problems]
        print_json({"counts": dict(counts), "problems": found})
    else:
        for problem in problems:
            console.print(str(problem.error()), markup=False, highlight=False, soft_wrap=True)
        console.print(
            ", ".join(f"{kind}: {count}" for kind, count in counts.items()) or "no problem found",
            markup=False,
        )
    if problems:
        raise typer.Exit(2)


@app.command()
def add(
    files: Annotated[list[Path], typer.Argument(help="Files of records.")],
    to: Annotated[str, typer.Option(help="pool (inputs without labels) or labelled.")] = "pool",
    workspace: WorkspaceOption = HERE,
) -> None:
    """Copy files into the workspace; the next round takes them in."""
    if to not in ("pool", "labelled"):
        raise UserError(f"no set `{to}`", where="--to", fix="pool or labelled")
    with opened(workspace, write=True) as (_, config):
        answers = to == "labelled"
        labels = (config.task.label_set or None) if answers else None
        for file in files:
            problems = find_problems(file, config.data.columns, labels, name=str(file), answers=answers)
            bad = [problem for problem in problems if problem.kind not in ("duplicate", "conflicting labels")]
            if bad:
                raise bad[0].error()
        folder = workspace / "data" / to
        contents: dict[Path, bytes] = {}
        for file in files:
            if file.is_dir() or file.name.startswith("."):
                raise UserError("only plain files are copied", where=str(file), fix=f"name it in `data.{to}`")
            target, content = folder / file.name, file.read_bytes()
            before = target.read_bytes() if target.exists() else contents.get(target, content)
            if before != content:
                raise UserError("another file of this name was added before", where=str(target), fix="rename yours")
            contents[target] = content
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for target, content in contents.items():
            write_atomically(target, content)
            console.print(f"added {target}", markup=False, soft_wrap=True)


@app.command(name="list")
def list_versions(workspace: WorkspaceOption = HERE, json: JsonOption = False) -> None:
    """All dataset versions."""
    with opened(workspace, checked=False) as (store, _):
        rows: list[dict[str, Any]] = []
        for named in store.metadata.names():
            artifact = store.metadata.artifact(named.artifact_id)
            counts = artifact.meta["counts"] if artifact else {}
            rows.append(
                {
                    "version": f"{named.name}@v{named.version}",
                    "records": counts.get("records"),
                    "rejected": counts.get("rejected"),
                    "id": named.artifact_id,
                    "parent": named.parent,
                    "created": named.created_at.isoformat(timespec="seconds"),
                }
            )
    if json:
        print_json(rows)
    else:
        print_table("", ["version", "records", "rejected", "id", "parent"], [list(row.values())[:5] for row in rows])


@app.command()
def show(
    version: Version,
    workspace: WorkspaceOption = HERE,
    rejected: Annotated[bool, typer.Option("--rejected", help="What its making took out, and why.")] = False,
    limit: Annotated[int, typer.Option(help="At most so many rows.")] = 20,
    json: JsonOption = False,
) -> None:
    """A version's funnel and records, or what was rejected on the way to it."""
    with opened(workspace, checked=False) as (store, _):
        dataset = dataset_version(store, version)
    table = dataset.rejected if rejected else dataset.records
    if json:
        print_json({**dataset.meta, "rejected" if rejected else "records": table.slice(0, limit).to_pylist()})
        return
    print_table(
        "",
        ["step", "reason", "records"],
        [[e["step"], e["reason"], e["count"]] for e in dataset.meta["funnel"]],
    )
    columns = ["id", "input", "step", "reason", "detail"] if rejected else ["id", "input", "answer", "file", "line"]
    rows = [_record_row(record, rejected) for record in table.slice(0, limit).to_pylist()]
    print_table(f"{min(limit, table.num_rows)} of {table.num_rows} records", columns, rows)


@app.command()
def diff(older: Version, newer: Version, workspace: WorkspaceOption = HERE, json: JsonOption = False) -> None:
    """What came and what went between two versions, and why."""
    with opened(workspace, checked=False) as (store, _):
        found = difference(dataset_version(store, older), dataset_version(store, newer))
    if json:
        print_json({name: getattr(found, name).to_pylist() for name in ("came", "went", "changed")})
        return
    console.print(f"{found.came.num_rows} came, {found.went.num_rows} went, {found.changed.num_rows} changed")
    print_table(
        "came",
        ["id", "input", "answer", "file", "line"],
        [_record_row(r, False) for r in found.came.to_pylist()],
    )
    print_table(
        "went",
        ["id", "input", "step", "reason", "detail"],
        [_record_row(r, True) for r in found.went.to_pylist()],
    )
    changed = [
        [r["input_id"], r["before"], r["after"], f"{r['source']}:{r['line']}"] for r in found.changed.to_pylist()
    ]
    print_table("changed", ["input", "before", "after", "where"], changed)


@app.command()
def export(
    version: Version,
    file: Annotated[Path, typer.Argument(help=".jsonl, .csv, .tsv or .parquet")],
    workspace: WorkspaceOption = HERE,
) -> None:
    """Write a version's records to a new file."""
    with opened(workspace, checked=False) as (store, _):
        dataset = dataset_version(store, version)
    export_records(dataset.records, file)
    console.print(f"wrote {dataset.records.num_rows} records to {file}", markup=False)


def _pool_files(config: Config, root: Path) -> set[Path]:
    """The files that are in the pool alone: the loop hides whatever answers they hold."""
    data = with_added_files(config.data, root)
    pool, answered = (
        {(root / Path(name).expanduser()).resolve() for name in names} for names in (data.pool, data.answered_files)
    )
    return pool - answered


def dataset_version(store: Workspace, text: str) -> Dataset:
    """The version that a name, ``name@vN`` or an id says; a UserError if there is none."""
    id = store.metadata.named(text) or store.metadata.resolve(text)
    row = store.metadata.artifact(id)
    if row is None or row.kind != "dataset":
        raise UserError(f"`{text}` is no dataset version", fix="posttrain data list")
    return read_dataset(store.artifacts.path(id))


def _record_row(record: dict[str, Any], rejected: bool) -> list[Any]:
    words = record["text"] or " / ".join(turn["content"] for turn in record["prompt"] or [])
    shown = words if len(words) <= _WIDTH else words[: _WIDTH - 1] + "…"
    if rejected:
        return [record["id"], shown, record["step"], record["reason"], record["detail"]]
    return [record["id"], shown, record["completion"], record["source"], record["line"]]


_WIDTH = 60
