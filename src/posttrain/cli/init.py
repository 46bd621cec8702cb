"""``posttrain init``: make an empty workspace."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import print_line
from posttrain.loop.config import Config, create_workspace
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.yaml_files import read_yaml


def init(
    directory: Annotated[Path, typer.Argument(help="Folder of the new workspace.")],
    template: Annotated[
        str, typer.Option(help="classify (a closed set of labels) or answer (free text).")
    ] = "classify",
) -> None:
    """Create a workspace with a commented posttrain.yaml."""
    templates = resources.files("posttrain.cli") / "templates"
    source = templates / f"{template}.yaml"
    if not source.is_file():
        names = sorted(entry.name.removesuffix(".yaml") for entry in templates.iterdir())
        raise UserError(f"no template `{template}`", where="--template", fix=f"one of {', '.join(names)}")
    config = directory / CONFIG_FILE
    create_workspace(directory, source.read_bytes())
    print_line(
        f"made {directory}; put {', '.join(_required_files(config))} in it as {CONFIG_FILE} says, "
        f"then: posttrain run -w {directory}",
    )


def _required_files(config: Path) -> list[str]:
    values = Config.read(read_yaml(config), CONFIG_FILE)
    labels = [values.task.labels] if isinstance(values.task.labels, str) else []
    return [*labels, *values.data.files]
