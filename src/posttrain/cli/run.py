"""``posttrain run``: run the loop."""

from typing import Annotated

import typer

from posttrain.cli.output import log_to_file, print_line
from posttrain.cli.status import print_rounds
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace


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
) -> None:
    """Run the loop; resume where it stopped."""
    from posttrain.inspect.random_baseline import check_random_loop, run_random_loop
    from posttrain.label.webhook import webhook_calls
    from posttrain.loop.loop import Loop

    with (
        open_workspace(workspace, write=True) as (store, config),
        log_to_file(store.home / "run.log"),
        webhook_calls(store.metadata, config.label.webhook),
    ):
        if baseline:
            check_random_loop(config, baseline)
        waiting = Loop(store, config).run(rounds, until, urgent)
        # After the loop, in its data of today and for as many rounds as it has done.
        comparison = run_random_loop(store, config) if baseline else None
        print_rounds(store, config)
    if comparison:
        print_line(comparison.conclusion)
    if waiting:
        print_line(f"waiting for {waiting}")
