"""``posttrain data check``: every problem of some files."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.data.stored import ColumnOption, columns_with, say_unused
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, print_json
from posttrain.data.reading.check import check as find_problems
from posttrain.data.reading.paths import Place, expand, shown
from posttrain.data.reading.problem import Problem, gathered
from posttrain.loop.config import CONFIG_FILE, Config, load_config
from posttrain.loop.stages.collect import with_added_files
from posttrain.store.errors import UserError


def check(
    files: Annotated[list[str], typer.Argument(help="Files of records, globs or URLs.")],
    column: ColumnOption = None,
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """Every problem of the files, with file and line; leaves with 2 if `data add` would refuse one for it."""
    config = load_config(workspace) if (workspace / CONFIG_FILE).is_file() else None
    columns = columns_with(config.data.columns if config else None, column)
    labels = config.task.label_set or None if config else None
    unanswered = _pool_files(config, workspace) if config else set()
    places, problems = _expanded(files)
    for file in places:
        allowed = None if isinstance(file, Path) and file.resolve() in unanswered else labels
        problems += find_problems(file, columns, allowed, name=shown(file, Path()), answers=False)
    counts = Counter(problem.kind for problem in problems)
    blocking = any(problem.blocking for problem in problems)
    if json:
        print_json({"counts": dict(counts), "problems": [_values(problem) for problem in problems]})
    else:
        for problem in gathered(problems):
            _line(str(problem.error()))
        _line(", ".join(f"{kind}: {count}" for kind, count in counts.items()) or "no problem found")
        if problems and not blocking:
            _line("`data add` takes the files: these records are left out, or taken out by steps, and counted")
    say_unused([file for file in places if not isinstance(file, Path) or file.exists()], Path(), columns)
    if blocking:
        raise typer.Exit(2)


def _expanded(names: Sequence[str]) -> tuple[list[Place], list[Problem]]:
    """The files that the names stand for, each once, and a problem for each name that stands for none."""
    found: dict[Place, None] = {}
    problems = []
    for name in names:
        try:
            found.update(dict.fromkeys(expand([name], Path())))
        except UserError as error:
            problems.append(Problem(error.where or name, None, "missing file", error.what, error.fix))
    return list(found), problems


def _values(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in ("file", "line", "kind", "message", "fix", "blocking")}


def _line(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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
