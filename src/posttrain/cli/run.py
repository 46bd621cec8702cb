"""``posttrain run``: turn the loop."""

from typing import Annotated

import typer

from posttrain.cli.shared import HERE, WorkspaceOption, console, opened
from posttrain.cli.status import print_rounds


def run(
    workspace: WorkspaceOption = HERE,
    rounds: Annotated[
        int | None, typer.Option(min=0, help="Number of the last round; the config's by default.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage of the round in progress.")] = None,
    urgent: Annotated[bool, typer.Option("--urgent", help="Tell the triggers that this is urgent.")] = False,
    baseline: Annotated[
        str | None, typer.Option(help="random: the same loop beside it with records drawn at random, to compare.")
    ] = None,
) -> None:
    """Turn the loop; goes on where it stopped."""
    from posttrain.loop.baseline import check_baseline, run_baseline
    from posttrain.loop.loop import Loop

    with opened(workspace, write=True) as (store, config):
        if baseline:
            check_baseline(config, baseline)
        waiting = Loop(store, config).run(rounds, until, urgent)
        found = run_baseline(store, config) if baseline else None
        print_rounds(store, config)
    if found:
        console.print(found.conclusion, markup=False, soft_wrap=True)
    if waiting:
        console.print(f"waiting for {waiting}", markup=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(run)
