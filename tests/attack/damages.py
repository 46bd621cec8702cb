"""Damages copies of a small workspace at random: `posttrain verify` must find each damage and invent none.

By hand, for as long as you like: ``python tests/attack/damages.py --count 1000``.
"""

import argparse
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from file_damages import (
    Names,
    append,
    append_line,
    damage_file,
    delete,
    empty,
    extra_file,
    flip,
    halve,
    on_artifact,
    on_file,
    overwrite_page,
    remove_artifact,
    remove_line,
    rename,
    swap_files,
    swap_lines,
    truncate,
)

from posttrain.cli.main import main as posttrain
from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox, seal_inbox
from posttrain.inspect.verify import verify
from posttrain.store.config import StoreConfig
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import remove_tree

TABLES = ("artifacts", "runs", "run_inputs", "rounds", "deployments", "names", "tags", "journal")
# One damaged row shows in several places: in its table, in rows that refer to it, in the round or link that it decides.
DATABASE = ("store.db", "round ", "deployment ", "artifacts, row ", "/champion")

UNDAMAGED_EVERY = 20
"""Every so many copies stay as they are: a finding in one of those is invented."""


@dataclass
class Result:
    """Counts by kind of damage: how many were found, and how many with --quick; a line for each miss or invention."""

    detected: Counter[str] = field(default_factory=Counter)
    detected_quick: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def database(root: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(root / ".posttrain" / "store.db", isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    return connection


def random_row(connection: sqlite3.Connection, draw: random.Random, table: str) -> int:
    return int(draw.choice(connection.execute(f"SELECT rowid FROM {table}").fetchall())[0])


def delete_row(root: Path, draw: random.Random) -> Names:
    with closing(database(root)) as connection:
        table = draw.choice(TABLES)
        connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (random_row(connection, draw, table),))
    return DATABASE


def change_row(root: Path, draw: random.Random) -> Names:
    with closing(database(root)) as connection:
        table = draw.choice(TABLES)
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        row = random_row(connection, draw, table)
        while True:
            column = draw.choice(columns)
            (value,) = connection.execute(f"SELECT {column} FROM {table} WHERE rowid = ?", (row,)).fetchone()
            try:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (other(value, draw), row))
                return (*DATABASE, "journal.jsonl", f"[{table}.{column} of row {row}]")
            except sqlite3.IntegrityError:
                continue  # the value must be unique


def other(value: Any, draw: random.Random) -> Any:
    """Another value of the same kind; of a text with numbers, another number."""
    if value is None:
        return draw.choice((1, "text", 0.5))
    if isinstance(value, int):
        return value + draw.choice((-1, 1, 7))
    if isinstance(value, float):
        return value * 1.5 + 1
    digits = [index for index, character in enumerate(value) if character.isdigit()]
    if not digits:
        return f"{value}x"
    index = draw.choice(digits)
    return value[:index] + str((int(value[index]) + draw.randrange(1, 9)) % 10) + value[index + 1 :]


def change_metric(root: Path, draw: random.Random) -> Names:
    """Improves the accuracy of a round, with the journal's knowledge or without."""
    with closing(database(root)) as connection:
        number = draw.choice(connection.execute("SELECT number FROM rounds WHERE arm = ''").fetchall())[0]
        statement = (
            "UPDATE rounds SET detail = json_set(detail, '$.metrics.accuracy', 0.99) WHERE arm = '' AND number = ?"
        )
        connection.execute(statement, (number,))
    if draw.random() < 0.5:
        (root / ".posttrain" / "journal.jsonl").unlink()
    return f"round {number}", f"rounds, row {number}", "journal.jsonl"


def copy_row(root: Path, draw: random.Random) -> Names:
    """Inserts a row that nobody wrote."""
    with closing(database(root)) as connection:
        table, column = draw.choice((("deployments", "id"), ("runs", "number"), ("rounds", "number"), ("tags", "tag")))
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        row = random_row(connection, draw, table)
        new = {column: "'new'" if column == "tag" else "1000"} | ({"id": "'run-new'"} if table == "runs" else {})
        values = ", ".join(new.get(name, name) for name in columns)
        connection.execute(f"INSERT INTO {table} SELECT {values} FROM {table} WHERE rowid = ?", (row,))
    return DATABASE


def drop_table(root: Path, draw: random.Random) -> Names:
    with closing(database(root)) as connection:
        connection.execute(f"DROP TABLE {draw.choice((*TABLES, 'posttrain_version'))}")
    return DATABASE


def forget_version(root: Path, draw: random.Random) -> Names:
    with closing(database(root)) as connection:
        connection.execute("DELETE FROM posttrain_version")
    return DATABASE


def link(root: Path, draw: random.Random) -> Path:
    return root / ".posttrain" / draw.choice(("champion", "champion-random"))


def retarget_champion(root: Path, draw: random.Random) -> Names:
    path = link(root, draw)
    others = [folder for folder in sorted(root.glob(".posttrain/artifacts/*-*")) if folder != path.resolve()]
    path.unlink()
    path.symlink_to(Path("artifacts", draw.choice(others).name))
    return (path.name,)


def remove_champion(root: Path, draw: random.Random) -> Names:
    path = link(root, draw)
    path.unlink()
    return (path.name,)


def dangling_champion(root: Path, draw: random.Random) -> Names:
    path = link(root, draw)
    path.unlink()
    path.symlink_to("artifacts/model-0123456789abcdef")
    return (path.name,)


def copied_champion(root: Path, draw: random.Random) -> Names:
    """Puts a folder in the link's place, as `cp -rL` does, and damages it."""
    path = link(root, draw)
    folder = path.resolve()
    path.unlink()
    shutil.copytree(folder, path)
    damage_file(path / "model.safetensors", draw.choice((flip, truncate, append, empty, delete)), draw)
    return (path.name,)


DAMAGES: dict[str, Callable[[Path, random.Random], Names]] = {
    "artifact: flip a bit": on_artifact(flip),
    "artifact: truncate a file": on_artifact(truncate),
    "artifact: append to a file": on_artifact(append),
    "artifact: empty a file": on_artifact(empty),
    "artifact: delete a file": on_artifact(delete),
    "artifact: rename a file": on_artifact(rename),
    "artifact: extra file": extra_file,
    "artifact: swap two files": swap_files,
    "artifact: remove it": remove_artifact,
    "row: delete": delete_row,
    "row: change a column": change_row,
    "row: change a metric": change_metric,
    "row: insert": copy_row,
    "database: drop a table": drop_table,
    "database: forget its version": forget_version,
    "database: delete": on_file("store.db", delete),
    "database: empty": on_file("store.db", empty),
    "database: halve": on_file("store.db", halve),
    "database: overwrite a page": on_file("store.db", overwrite_page),
    "journal: flip a bit": on_file("journal.jsonl", flip),
    "journal: truncate": on_file("journal.jsonl", truncate),
    "journal: append a line": on_file("journal.jsonl", append_line),
    "journal: empty": on_file("journal.jsonl", empty),
    "journal: delete": on_file("journal.jsonl", delete),
    "journal: remove a line": on_file("journal.jsonl", remove_line),
    "journal: swap two lines": on_file("journal.jsonl", swap_lines),
    "champion: another target": retarget_champion,
    "champion: remove the link": remove_champion,
    "champion: dangling link": dangling_champion,
    "champion: damaged copy": copied_champion,
    "scores: flip a bit": on_file("scores*/*/*/*.chunk", flip),
    "scores: truncate": on_file("scores*/*/*/*.chunk", truncate),
    "scores: append": on_file("scores*/*/*/*.chunk", append),
    "scores: empty": on_file("scores*/*/*/*.chunk", empty),
    "scores: rename": on_file("scores*/*/*/*.chunk", rename, ".chunk"),
    "feedback: flip a bit": on_file("inbox/segments/0*.[jo]*", flip),
    "feedback: append a line": on_file("inbox/segments/0*.[jo]*", append_line),
    "feedback: empty a sealed segment": on_file("inbox/segments/0*.jsonl", empty),
    "feedback: delete a sealed segment": on_file("inbox/segments/0*.jsonl", delete),
    "workspace: delete format.json": on_file("format.json", delete),
}

SIZE_CHANGES = {
    name for name in DAMAGES if name.startswith("artifact: ") and not name.endswith(("flip a bit", "swap two files"))
}
"""The damages of artifacts that --quick finds, too."""


def build_workspace(small: Any) -> Path:
    """Makes a workspace with everything in it: rounds of two loops, a named version, scores, feedback."""
    root: Path = small(rounds=1)
    small.write(root / "more.csv", small.rows()[80:])
    call("run", "--baseline", "random", root=root)
    call("data", "add", str(root / "more.csv"), "--name", "support", root=root)
    call("data", "tag", "support@v1", "production", root=root)
    inbox = root / ".posttrain" / "inbox"
    for start in (0, 10, 20):
        with Inbox(inbox) as writer:
            for number in range(start, start + 10):
                writer.append(
                    Feedback(id=f"f{number}", prompt="p", completion=f"answer {number}", rating="up")
                ).result()
        if start < 20:
            seal_inbox(inbox)
    return root


def call(*arguments: str, root: Path) -> None:
    """Runs a verb in this process."""
    try:
        posttrain([*arguments, "-w", str(root)])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{' '.join(arguments)} exits with {end.code}") from None


def findings(root: Path, *, quick: bool = False) -> list[str]:
    try:
        return [finding.line for finding in verify(root, StoreConfig(), quick=quick).findings]
    except (UserError, WorkError) as error:
        return [str(error)]


def damage_copies(original: Path, folder: Path, count: int, seed: int = 0) -> Result:
    """Damages and verifies ``count`` copies, each kind in turn."""
    result = Result()
    kinds = list(DAMAGES)
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        root = folder / str(number)
        shutil.copytree(original, root, symlinks=True)
        if number % UNDAMAGED_EVERY == 0:
            lines = findings(root) + findings(root, quick=True)
            result.problems += [f"{number}: invented: {line}" for line in lines]
            result.detected["none"] += not lines
        kind = kinds[number % len(kinds)]
        names = DAMAGES[kind](root, draw)
        lines = findings(root)
        invented = [line for line in lines if not any(name in line for name in names)]
        result.problems += [f"{number}: {kind}: invented: {line}" for line in invented]
        if not lines:
            result.problems.append(f"{number}: {kind}: not found: {names}")
        result.detected[kind] += bool(lines)
        if kind in SIZE_CHANGES:
            lines = findings(root, quick=True)
            result.detected_quick[kind] += bool(lines)
            if not lines:
                result.problems.append(f"{number}: {kind}: not found by --quick: {names}")
        remove_tree(root)
    return result


def report_lines(result: Result, count: int) -> Iterator[str]:
    kinds = list(DAMAGES)
    for kind, name in enumerate(kinds):
        total = len(range(kind, count, len(kinds)))
        quick = f"{result.detected_quick[name]:5} with --quick" if name in SIZE_CHANGES else ""
        yield f"{name:36} {total:5} done {result.detected[name]:5} found {quick}"
    undamaged = len(range(0, count, UNDAMAGED_EVERY))
    yield f"{'no damage':36} {undamaged:5} copies, {result.detected['none']:5} without a finding"
    yield f"{sum(result.detected[name] for name in kinds):,} of {count:,} damages found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tests = Path(__file__).parents[1]
    sys.path[:0] = map(str, (tests, tests / "data", tests / "store"))  # where conftest finds its parts under pytest
    from conftest import SmallWorkspaces

    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        original = build_workspace(SmallWorkspaces(Path(name)))
        result = damage_copies(original, Path(name), arguments.count, arguments.seed)
    for line in report_lines(result, arguments.count):
        print(line)
    print(f"{time.monotonic() - start:.0f} s")
    for problem in result.problems:
        print(f"PROBLEM: {problem}")
    sys.exit(1 if result.problems else 0)


if __name__ == "__main__":
    main()
