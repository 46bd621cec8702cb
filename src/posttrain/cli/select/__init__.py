"""``posttrain select``: what to label next and why, and what is known of labels; one file a verb."""

import typer

from posttrain.cli.select import adversarial, batch, explain, value
from posttrain.cli.select.batch import select


def add_to(parent: typer.Typer) -> None:
    """Register the group, which without a verb chooses a batch."""
    app = typer.Typer(name="select")
    app.callback(invoke_without_command=True)(select)
    for verb in (batch, value, explain, adversarial):
        verb.add_to(app)
    parent.add_typer(app)
