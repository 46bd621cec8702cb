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
) -> None:
    """Turn the loop; goes on where it stopped."""
    from posttrain.loop.loop import Loop

    with opened(workspace, write=True) as (store, config):
        waiting = Loop(store, config).run(rounds, until, urgent)
        print_rounds(store, config)
    if waiting:
        console.print(f"waiting for {waiting}", markup=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(run)
