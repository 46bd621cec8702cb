"""``posttrain run``: run the loop."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import log_to_file, print_line
from posttrain.cli.status import print_rounds
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.store.workspace import Workspace

if TYPE_CHECKING:
    from posttrain.loop.config import Config


def run(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    rounds: Annotated[
        int | None, typer.Option(min=0, help="Number of the last round; `rounds` of the config by default.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage of the round in progress.")] = None,
    urgent: Annotated[bool, typer.Option("--urgent", help="Set `urgent` to 1 in the triggers.")] = False,
    baseline: Annotated[
        str | None, typer.Option(help="random: also run the same loop with randomly drawn records, to compare.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Where the loop waits, watch for answers, files and feedback, and go on.")
    ] = False,
) -> None:
    """Run the loop; resume where it stopped."""
    reported = None
    while True:
        waiting, before = _run_once(workspace, rounds, until, urgent, baseline, reported)
        # While it watches it looks every ten minutes, for days perhaps: what has not changed is said once.
        if waiting and waiting != reported:
            print_line(f"waiting for {waiting}")
        reported = waiting
        if not (watch and waiting):
            return
        _wait(workspace, before)
        urgent = False  # one round is requested, not all that follow


def _run_once(
    workspace: Path, rounds: int | None, until: str | None, urgent: bool, baseline: str | None, reported: str | None
) -> tuple[str | None, dict[str, Any]]:
    """Runs the loop until it waits; returns what it waits for, and the watched state of before.

    Prints the rounds, unless it waits for what is ``reported`` already.
    """
    from posttrain.inspect.random_baseline import check_random_loop, run_random_loop
    from posttrain.label.webhook import webhook_calls
    from posttrain.loop.loop import Loop, watched_state

    with (
        open_workspace(workspace, write=True) as (store, config),
        log_to_file(store.home / "run.log"),
        webhook_calls(store.metadata, config.label.webhook, partial(_alarms, store, config)),
    ):
        if baseline:
            check_random_loop(config, baseline)
        before = watched_state(store, config)
        waiting = Loop(store, config).run(rounds, until, urgent)
        # After the loop, in its data of today and for as many rounds as it has done.
        comparison = run_random_loop(store, config) if baseline else None
        if waiting is None or waiting != reported:
            print_rounds(store, config)
    if comparison:
        print_line(comparison.conclusion)
    return waiting, before


def _wait(workspace: Path, before: dict[str, Any]) -> None:
    """Waits for a change, and makes the webhook's calls meanwhile: days may pass, and calls fail."""
    from posttrain.label.webhook import webhook_calls
    from posttrain.loop.config import load_config
    from posttrain.loop.loop import wait_for_change

    config = load_config(workspace)
    with ExitStack() as stack:
        # Held open only for the webhook: else nothing is held while nothing happens.
        if (url := config.label.webhook) is not None:
            store, _ = stack.enter_context(open_workspace(workspace, write=True))
            stack.enter_context(webhook_calls(store.metadata, url, partial(_alarms, store, config)))
        wait_for_change(workspace, config, before)


def _alarms(store: Workspace, config: "Config") -> list[dict[str, Any]]:
    from posttrain.label.quality.queue_report import queue_alarms
    from posttrain.label.queue import Queue

    return queue_alarms(Queue(store.metadata, config.label.queue), config.label.quality)
