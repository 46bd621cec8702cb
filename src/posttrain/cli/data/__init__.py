"""``posttrain data``: records and dataset versions, one file a verb."""

import typer

from posttrain.cli.data import add, check, diff, export, gc, report, show, synthesize, versions, why

app = typer.Typer(name="data", help="Records and dataset versions.", no_args_is_help=True)
for verb in (check, add, versions, show, why, diff, export, report, synthesize, gc):
    verb.add_to(app)
