"""``posttrain init`` and ``posttrain demo``: make a workspace, empty or with the bundled task."""

import time
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import print_line
from posttrain.cli.run import print_rounds
from posttrain.cli.workspace import open_workspace
from posttrain.loop.config import Config, read_yaml
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.workspace import Workspace


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
        known = sorted(entry.name.removesuffix(".yaml") for entry in templates.iterdir())
        raise UserError(f"no template `{template}`", where="--template", fix=f"one of {', '.join(known)}")
    config = directory / CONFIG_FILE
    if config.exists():
        raise UserError("a workspace is here already", where=str(config), fix="posttrain run")
    make_folder(directory)
    Workspace.create(directory).close()
    # The config last: its presence says that a workspace is here, and a killed init can be run again.
    write_atomically(config, source.read_bytes())
    print_line(
        f"made {directory}; put {', '.join(_required_files(config))} in it as {CONFIG_FILE} says, "
        f"then: posttrain run -w {directory}",
    )


def _required_files(config: Path) -> list[str]:
    values = Config.read(read_yaml(config), CONFIG_FILE)
    labels = [values.task.labels] if isinstance(values.task.labels, str) else []
    return [*labels, *values.data.files]


def demo(
    dir: Annotated[Path, typer.Option("--dir", help="The demo's workspace.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model; about a minute.")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Your own labelled file in place of the bundled task.")
    ] = None,
) -> None:
    """Run the whole loop on a bundled task: label a few records, train, deploy only a better model."""
    from posttrain.demo.workspace import prepare_workspace
    from posttrain.loop.loop import Loop
    from posttrain.web.report import write_report
    from posttrain.web.report_reader import read_report

    start = time.monotonic()
    prepare_workspace(dir, quick=quick, data=data)
    with open_workspace(dir, write=True) as (store, config):
        waiting = Loop(store, config).run()
        print_rounds(store, config)
        report = dir / "report.html"
        write_report(read_report(store, config), report)
    lines = [
        f"waiting for {waiting}" if waiting else f"done in {time.monotonic() - start:.0f} s",
        f"report: {report}",
        f"champion: {dir}/.posttrain/champion (Hugging Face layout)",
        f"next: posttrain show champion -w {dir}   posttrain status -w {dir}   posttrain data list -w {dir}",
    ]
    print_line("\n".join(lines))
