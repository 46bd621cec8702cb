"""Kills a command with ``kill -9`` at many moments, runs it again, and compares with the command that nobody killed.

``python tests/attack/kills.py [VERB ...] [--count 200] [--seed 0]``

A verb prepares a workspace, names its command, and reads the outcome that must not differ. The process kills itself
while it executes a line of posttrain: the lines of an uninterrupted run are counted first, and the moments are spread
over them. So each moment is a moment of the program's own work, and a seed repeats it exactly.
"""

import argparse
import gc
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import at_lines, kill_at

_SKIPPED = ("cli/main.py", "cli/verbs.py", "cli/output.py")

# Forked from a process that has done the slow imports: starting Python again would take longer than the verbs.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *("posttrain.cli.models", "posttrain.cli.run", "posttrain.cli.train", "posttrain.cli.backup"),
        *("posttrain.cli.data.add", "posttrain.data.versions.named_build", "posttrain.jobs.map"),
        *("posttrain.loop.loop", "posttrain.train.api", "posttrain.models.tiny", "posttrain.models.label_tree"),
        *("posttrain.select.selectors.k_means", "posttrain.store.restore", "posttrain.inspect.verify"),
        *("alembic.command", "rensa", "sklearn.cluster", "transformers.models.llama.modeling_llama"),
    ]
)


@dataclass(frozen=True)
class Verb:
    """A command to kill.

    Attributes:
        prepare: Fills a new folder with the workspace that the command starts from.
        command: Arguments of ``posttrain`` for a workspace.
        compare: Reads the outcome, as a value that equal runs share; raises where the workspace is not sound.
        codes: Exit codes of the repetition; 2 is one if a command refuses what was done already.
    """

    prepare: Callable[[Path], None]
    command: Callable[[Path], list[str]]
    compare: Callable[[Path], Any]
    codes: Sequence[int] = (0,)


@dataclass(frozen=True)
class Result:
    """The kills of one verb; ``differences`` has a line for each that did not end as the uninterrupted run."""

    lines: int
    killed: int
    finished: int
    differences: list[str]


def attack(verb: Verb, folder: Path, count: int, seed: int = 0) -> Result:
    """Kills a verb ``count`` times, each in a fresh copy of its workspace; some are killed twice."""
    template = folder / "template"
    template.mkdir(parents=True)
    verb.prepare(template)
    reference = _copy(template, folder / "reference")
    lines_file = folder / "lines"
    assert _run(verb.command(reference), reference, None, lines_file) == 0, _log(reference)
    lines, expected = int(lines_file.read_text()), verb.compare(reference)
    draw = random.Random(seed)
    killed, finished, differences = 0, 0, []
    for number in range(count):
        # One moment from each of `count` equal parts, so that few kills cover the whole run too.
        moment = int((number + draw.random()) / count * lines)
        moments = [moment] if number % 4 else [moment, draw.randrange(lines)]
        root = _copy(template, folder / "attacked")
        for at in moments:
            code = _run(verb.command(root), root, at)
            killed += code == -signal.SIGKILL
            finished += code == 0
        code = _run(verb.command(root), root, None)
        name = f"killed at line {', '.join(map(str, moments))} of {lines}"
        if code not in verb.codes:
            differences.append(f"{name}: exit code {code}: {_log(root)[-500:]}")
        elif (outcome := _outcome(verb, root)) != expected:
            differences.append(f"{name}: {outcome} instead of {expected}")
        shutil.rmtree(root)
    return Result(lines, killed, finished, differences)


def _outcome(verb: Verb, root: Path) -> Any:
    try:
        return verb.compare(root)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a difference
        return f"{type(error).__name__}: {error}"


def _copy(template: Path, root: Path) -> Path:
    shutil.copytree(template, root, symlinks=True)
    return root


def _log(root: Path) -> str:
    return root.with_suffix(".log").read_text(encoding="utf-8", errors="replace")


def _run(arguments: list[str], root: Path, at: int | None, lines: Path | None = None) -> int | None:
    """Runs ``posttrain ARGUMENTS`` in a process of its own; returns its exit code, -9 after a kill.

    Args:
        at: Line of posttrain's work, counted from 0, at which the process kills itself; None: it is left alone.
        lines: File for the number of lines; None: they are not counted.
    """
    process = _FORKS.Process(target=_work, args=(arguments, root.with_suffix(".log"), at, lines))
    process.start()
    process.join(600)
    return process.exitcode


def _work(arguments: list[str], log: Path, at: int | None, lines: Path | None) -> None:
    from posttrain.cli.main import main

    gc.enable()  # off in a server that has imported `without_gc`
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    count, kill = 0, kill_at(-1 if at is None else at)

    def act() -> None:
        nonlocal count
        count += 1
        kill()

    try:
        with at_lines(act, _SKIPPED) if at is not None or lines is not None else nullcontext():
            main(arguments)
    finally:
        if lines is not None:
            lines.write_text(str(count))


def run() -> int:
    from killed_verbs import VERBS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verbs", nargs="*", choices=[*VERBS, []], help="all by default")
    parser.add_argument("--count", type=int, default=200, help="kills of each verb")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    failed = False
    for name in arguments.verbs or VERBS:
        with tempfile.TemporaryDirectory(prefix="posttrain-kills-") as folder:
            result = attack(VERBS[name], Path(folder), arguments.count, arguments.seed)
        print(
            f"{name}: {result.lines:,} lines, {result.killed} kills, {result.finished} ended before theirs, "
            f"{len(result.differences)} differences"
        )
        print(*result.differences[:20], sep="\n", end="\n" if result.differences else "")
        failed |= bool(result.differences)
    return int(failed)


if __name__ == "__main__":
    sys.exit(run())
