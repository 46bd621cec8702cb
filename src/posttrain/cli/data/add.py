"""``posttrain data add`` and ``data check``: adds files to a version or the loop, and lists the problems of files."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import (
    CURRENT_FOLDER,
    ColumnOption,
    WorkspaceOption,
    merge_columns,
    open_store,
    open_workspace,
    report_unused_columns,
)
from posttrain.data.config import DataConfig
from posttrain.data.feedback.entries import KINDS
from posttrain.data.feedback.ingest import add_feedback, export_batch, ingest
from posttrain.data.reading.columns import require_column
from posttrain.data.reading.data_files import DataPath, display_path, expand_paths
from posttrain.data.reading.reader import check_file as find_problems
from posttrain.data.reading.rows import Problem, group_problems
from posttrain.data.versions.named_build import BuildConfig, build
from posttrain.loop.config import Config, load_config, read_config
from posttrain.loop.stages.collect import with_added_files
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, write_atomically
from posttrain.store.paths import path_problem
from posttrain.store.yaml_files import parse_yaml


def add(
    files: Annotated[
        list[str] | None, typer.Argument(help="Files of records; with --name also globs and URLs.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the dataset to build a version of.")] = None,
    to: Annotated[
        str | None, typer.Option(help="Where to copy the files without --name: pool (the default) or labelled.")
    ] = None,
    step: Annotated[
        list[str] | None,
        typer.Option(
            help="Cleaning step in place of `data.steps`, such as minhash or 'minhash: {threshold: 0.8}'; repeatable."
        ),
    ] = None,
    column: ColumnOption = None,
    version: Annotated[str | None, typer.Option(help="Number of the new version, such as 2.3.1.")] = None,
    note: Annotated[str | None, typer.Option(help="A note kept with the version.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Tag that NAME@TAG finds the new version by; repeatable.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Build from these files alone, not on top of the last version.")
    ] = False,
    inbox: Annotated[
        bool, typer.Option("--inbox", help="Also add the feedback collected by `posttrain serve`.")
    ] = False,
    on_error: Annotated[
        str,
        typer.Option(
            help="What to do with a record that cannot be read, with --name: stop, or skip it and keep the reason."
        ),
    ] = "stop",
    engine: Annotated[
        str, typer.Option(help="Where the steps run: inline, processes or ray; auto uses processes on several cores.")
    ] = "auto",
    workers: Annotated[int | None, typer.Option(help="Number of parallel workers.")] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Add files to the loop's pool; with --name, clean them by `data.steps` and store a dataset version."""
    batches = ingest(workspace.absolute() / ".posttrain" / "inbox") if inbox else []
    if not files and not inbox:
        raise UserError("no file is named", fix="posttrain data add FILE, or --inbox")
    if on_error not in ("stop", "skip"):
        raise UserError(f"`{on_error}` is neither stop nor skip", where="--on-error")
    for file in files or ():
        _refuse_label_studio(Path(file))
    if name is None:
        if on_error != "stop":
            fix = "--name NAME builds a dataset, which `data.pool` or `data.labelled` may name"
            raise UserError("the loop's files are copied whole", where="--on-error", fix=fix)
        if column:
            fix = "set `data.columns` in posttrain.yaml, which the loop reads by"
            raise UserError("only a named dataset takes columns", where="--column", fix=fix)
        if not (workspace / CONFIG_FILE).is_file():
            fix = "--name NAME builds a dataset version; -w DIR adds to the pool of that workspace; "
            raise UserError(f"no {CONFIG_FILE} here", where=str(workspace), fix=f"{fix}posttrain init DIR makes one")
        _add_to_loop([Path(file) for file in files or ()], to or "pool", workspace)
        if batches:
            loop = read_config(workspace)
            task = loop.task.with_labels_from(workspace)
            for path in add_feedback(workspace, batches, loop.data.columns, task.label_set, task.read_answer):
                print_line(f"added {path}")
        return
    if to is not None:
        raise UserError(
            "a named version does not belong to the loop's sets", where="--to", fix="leave out --to or --name"
        )
    values = {
        **_config_values(workspace, name),
        "name": name,
        "files": [_relative_to_root(file, workspace) for file in files or ()],
        "workspace": workspace,
        "version": version,
        "note": note,
        "tags": tag or [],
        "fresh": fresh,
        "on_error": on_error,
        "engine": engine,
        "workers": workers,
    }
    values["columns"] = merge_columns(values.get("columns"), column)
    # The config's columns are those of labelled files and pools alike; an option is about these files.
    values["optional_answers"] = not _names_answers(column)
    sources = expand_paths(values["files"], workspace.absolute())
    feedback_folder = workspace / "data" / "feedback"
    for batch in batches:
        folders = dict.fromkeys(KINDS, feedback_folder)
        paths = export_batch(batch, folders, values["columns"], values.get("labels", ()))
        values["files"] += [_relative_to_root(str(path), workspace) for path in paths]
    if step:
        values["steps"] = [parse_step_option(item) for item in step]
    config = BuildConfig.read(values, "posttrain data add")
    with open_store(workspace, write=True) as store:
        built = build(config, store)
        # Acknowledged only now: a kill before the version is committed leaves the feedback in the inbox.
        for batch in batches:
            batch.done()
        report_unused_columns(sources, workspace.absolute(), config.columns)
        # The last name of the artifact: the same files may have been added before under another version.
        named = next(item for item in reversed(store.metadata.names(name)) if item.artifact_id == built.id)
        if json:
            print_json({"version": named.text, "id": built.id, **built.meta})
            return
        rows = [[entry["step"], entry["reason"], entry["count"]] for entry in built.meta["funnel"]]
        print_table("", ["step", "reason", "records"], rows)
        parts = ", ".join(f"{count:,} {split}" for split, count in built.meta["counts"]["splits"].items() if count)
        print_line(f"{named.text}  {built.id}  {parts}")


def _refuse_label_studio(file: Path) -> None:
    """Raises a UserError for tasks of Label Studio, whose answers go through the queue."""
    from posttrain.label.formats.importer import detect_format

    try:
        if file.suffix.lower() not in (".json", ".jsonl") or detect_format(file, str(file)) != "label-studio":
            return
    except UserError:
        return  # the reader of records says what is wrong with it
    fix = f"posttrain label import {file}: its labels then join the training set"
    raise UserError("these are tasks of Label Studio", where=str(file), fix=fix)


def _config_values(root: Path, name: str) -> dict[str, Any]:
    """Reads the recipe from ``posttrain.yaml``; the defaults without one.

    Args:
        name: dataset that is built. Its own held-out records are kept apart by its split, not as a suite.
    """
    if not (root / CONFIG_FILE).is_file():
        return {"steps": DataConfig().steps}
    config = read_config(root)
    recipe = {"columns": config.data.columns, "steps": config.data.steps, "splits": config.data.splits}
    tests = config.data.test if isinstance(config.data.test, list) else []
    # Decontaminating a dataset against its own test split would empty that split.
    tests = [test for test in tests if test.partition("@")[0] != name or (root / test).exists()]
    suites: list[dict[str, Any]] = []
    for suite in config.evaluate.suites.values():
        files = tests if suite.data == "test" else [suite.data]
        suites += [{"file": file, "columns": None if suite.data == "test" else suite.columns} for file in files]
    return {**recipe, "labels": config.task.with_labels_from(root).label_set, "suites": suites}


def _names_answers(options: Sequence[str] | None) -> bool:
    """Returns whether a ``--column`` option names the column of answers."""
    return any(option.startswith("completion=") for option in options or ())


def parse_step_option(text: str) -> Any:
    """Parses a step written as YAML: its name, or `minhash: {threshold: 0.8}`."""
    return parse_yaml(text, "--step")


def _relative_to_root(file: str, root: Path) -> str:
    """Makes a path relative to the workspace if the file lies in it."""
    # So that the recipe, and with it the version's id, is the same wherever the workspace lies.
    if "://" in file:
        return file
    path = Path(os.path.abspath(Path(file).expanduser()))
    home = root.absolute()
    return str(path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _add_to_loop(files: list[Path], to: str, workspace: Path) -> None:
    """Copies files into the workspace; the next round reads them."""
    if to not in ("pool", "labelled"):
        raise UserError(f"no set `{to}`", where="--to", fix="pool or labelled")
    if not files:
        return
    with open_workspace(workspace, write=True) as (_, config):
        answers = to == "labelled"
        labels = (config.task.label_names or None) if answers else None
        for file in files:
            options: dict[str, Any] = {"name": str(file), "answers": answers, "read_answer": config.task.read_answer}
            problems = find_problems(file, config.data.columns, labels, **options)
            bad = [problem for problem in problems if problem.blocking]
            if bad:
                raise next(group_problems(bad)).error()
        folder = workspace / "data" / to
        contents: dict[Path, bytes] = {}
        for file in files:
            if file.is_dir() or file.name.startswith("."):
                raise UserError("only plain files are copied", where=str(file), fix=f"name it in `data.{to}`")
            target, content = folder / file.name, file.read_bytes()
            # The same file again changes nothing: a call that was killed can be repeated.
            before = target.read_bytes() if target.exists() else contents.get(target, content)
            if before != content:
                raise UserError("another file of this name was added before", where=str(target), fix="rename yours")
            # All files are read and checked before the first is written: a bad one leaves the workspace untouched.
            contents[target] = content
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for target, content in contents.items():
            write_atomically(target, content)
            print_line(f"added {target}")


def check(
    files: Annotated[list[str], typer.Argument(help="Files of records, globs or URLs.")],
    column: ColumnOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every bad record, not one line per kind of problem.")
    ] = False,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """List the problems of the files, with file and line; exit with 2 if `data add` would refuse one."""
    config = load_config(workspace) if (workspace / CONFIG_FILE).is_file() else None
    columns = merge_columns(config.data.columns if config else None, column)
    labels = config.task.label_names or None if config else None
    read_answer = config.task.read_answer if config else None
    unanswered = _pool_files(config, workspace) if config else set()
    sources, problems = _expand_names(files)
    answers = _names_answers(column)
    for file in sources:
        # The pool's answers are never read, so that a wrong one in it is not a problem.
        allowed = None if isinstance(file, Path) and file.resolve() in unanswered else labels
        name = display_path(file, Path())
        problems += find_problems(file, columns, allowed, name=name, answers=False, read_answer=read_answer)
        if answers and columns and not any(problem.blocking and problem.file == name for problem in problems):
            try:
                require_column(file, name, columns["completion"])
            except UserError as error:
                problems.append(Problem(name, 1, "missing column", error.what, error.fix))
    counts = Counter(problem.kind for problem in problems)
    blocking = any(problem.blocking for problem in problems)
    if json:
        print_json({"counts": dict(counts), "problems": [_problem_json(problem) for problem in problems]})
    else:
        lines = problems if every else list(group_problems(problems))
        for problem in lines:
            print_line(str(problem.error()))
        summary = ", ".join(f"{kind}: {count}" for kind, count in counts.items()) or "no problem found"
        print_line(f"{summary}; --all lists every record" if len(lines) < len(problems) else summary)
        if problems and not blocking:
            print_line("`data add` takes the files: these records are left out, or taken out by steps, and counted")
    report_unused_columns([file for file in sources if not isinstance(file, Path) or file.exists()], Path(), columns)
    if blocking:
        raise typer.Exit(2)


def _expand_names(names: Sequence[str]) -> tuple[list[DataPath], list[Problem]]:
    """Expands globs and URLs, each file once, and reports names that match nothing."""
    files: dict[DataPath, None] = {}
    problems = []
    for name in names:
        try:
            files.update(dict.fromkeys(expand_paths([name], Path())))
        except UserError as error:
            unusable = path_problem(Path(name))  # such as a pipe
            kind = unusable.kind if unusable else "missing file"
            problems.append(Problem(error.where or name, None, kind, error.what, error.fix))
    return list(files), problems


def _problem_json(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in ("file", "line", "kind", "message", "fix", "blocking")}


def _pool_files(config: Config, root: Path) -> set[Path]:
    """Returns the files used only as pool; the loop hides any answers in them."""
    data = with_added_files(config.data, root)
    pool, answered = (
        {(root / Path(name).expanduser()).resolve() for name in names} for names in (data.pool, data.answered_files)
    )
    return pool - answered
