"""``posttrain run``: run the loop."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import print_events, print_line
from posttrain.cli.status import print_rounds
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace, waiting_text
from posttrain.inspect.status import status
from posttrain.store.errors import UserError


def run(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    rounds: Annotated[
        int | None, typer.Option(min=0, help="Stop after the round of this number; `rounds` of the config by default.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="Stop the round in progress after this stage, such as select, label, dataset, train or evaluate."
        ),
    ] = None,
    urgent: Annotated[
        bool,
        typer.Option(
            "--urgent",
            help="Set `urgent` to 1 for the next round, so that a trigger such as `urgent > 0` starts it now.",
        ),
    ] = False,
    partial_batch: Annotated[
        bool,
        typer.Option("--partial", help="Continue with the labels given so far; unlabelled records return to the pool."),
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="random: also run a loop of as many rounds on records drawn at random, to compare; needs an oracle."
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Keep running: wait for answers, files, feedback, triggers and the schedule, then continue.",
        ),
    ] = False,
) -> None:
    """Run the loop until it is done or needs labels; the same command resumes it."""
    from posttrain.inspect.random_baseline import check_random_loop, run_random_loop
    from posttrain.loop.loop import Loop
    from posttrain.loop.watch import loop_session

    if watch:
        if until or baseline:
            raise UserError("one run stops or compares, and a watcher continues", where="--watch", fix="leave out one")
        _watch(workspace, rounds, urgent, partial_batch)
        return
    with loop_session(workspace) as (store, config):
        if baseline:
            check_random_loop(config, baseline)
        waiting = Loop(store, config).run(rounds, until, urgent, partial_batch)
        # After the loop, in its data of today and for as many rounds as it has done.
        comparison = run_random_loop(store, config) if baseline else None
        print_rounds(status(store, config))
    if comparison:
        print_line(comparison.conclusion)
    if waiting:
        print_line(waiting_text(waiting, workspace))
    elif until is None:
        print_line(f"next: posttrain show champion -w {workspace}   posttrain report -w {workspace}")


def _watch(workspace: Path, rounds: int | None, urgent: bool, partial_batch: bool) -> None:
    """Watches until the loop is done; prints a line for each event, and writes all lines to ``run.log``."""
    from posttrain.loop.watch import Watcher

    with print_events():
        Watcher(workspace.resolve(), rounds, urgent, partial_batch).run()
    with open_workspace(workspace) as (store, config):
        print_rounds(status(store, config))
