"""``posttrain init``: a workspace with a commented config."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.shared import console
from posttrain.loop.config import CONFIG_FILE, Config, read_yaml
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.workspace import Workspace


def init(
    directory: Annotated[Path, typer.Argument(help="Where the workspace is made.")],
    template: Annotated[
        str, typer.Option(help="classify (a closed set of labels) or answer (free text).")
    ] = "classify",
) -> None:
    """Make a workspace with a commented posttrain.yaml."""
    templates = resources.files("posttrain.cli") / "templates"
    source = templates / f"{template}.yaml"
    if not source.is_file():
        known = sorted(entry.name.removesuffix(".yaml") for entry in templates.iterdir())
        raise UserError(f"no template `{template}`", where="--template", fix=f"one of {', '.join(known)}")
    config = directory / CONFIG_FILE
    if config.exists():
        raise UserError("a workspace is here already", where=str(config), fix="posttrain run")
    make_folder(directory)
    Workspace.create(directory).close()
    write_atomically(config, source.read_bytes())
    console.print(
        f"made {directory}; put {', '.join(_named_files(config))} in it as {CONFIG_FILE} says, "
        f"then: posttrain run -w {directory}",
        markup=False,
        soft_wrap=True,
    )


def _named_files(config: Path) -> list[str]:
    values = Config.read(read_yaml(config), CONFIG_FILE)
    labels = [values.task.labels] if isinstance(values.task.labels, str) else []
    return [*labels, *values.data.files]


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(init)
