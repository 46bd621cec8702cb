"""``posttrain data check``: every problem of some files."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, print_json
from posttrain.data.check import check as find_problems
from posttrain.data.paths import expand, shown
from posttrain.loop.config import CONFIG_FILE, Config, load_config
from posttrain.loop.stages.collect import with_added_files


def check(
    files: Annotated[list[str], typer.Argument(help="Files of records, globs or URLs.")],
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """Every problem of the files, with file and line; leaves with 2 if there is one."""
    config = load_config(workspace) if (workspace / CONFIG_FILE).is_file() else None
    columns = config.data.columns if config else None
    labels = config.task.label_set or None if config else None
    unanswered = _pool_files(config, workspace) if config else set()
    problems = []
    for file in expand(files, Path()):
        allowed = None if isinstance(file, Path) and file.resolve() in unanswered else labels
        problems += find_problems(file, columns, allowed, name=shown(file, Path()), answers=False)
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
    if any(problem.blocking for problem in problems):
        raise typer.Exit(2)


def _pool_files(config: Config, root: Path) -> set[Path]:
    """The files that are in the pool alone: the loop hides whatever answers they hold."""
    data = with_added_files(config.data, root)
    pool, answered = (
        {(root / Path(name).expanduser()).resolve() for name in names} for names in (data.pool, data.answered_files)
    )
    return pool - answered


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(check)
