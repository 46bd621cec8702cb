"""``posttrain init``: makes a workspace, empty or for the user's own files."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import print_line
from posttrain.inspect.config_proposal import LABELS_FILE, DataFiles, Proposal, propose_config
from posttrain.loop.config import Config, create_workspace
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.message import counted
from posttrain.store.yaml_files import read_yaml


def init(
    directory: Annotated[Path, typer.Argument(help="Folder of the new workspace.")],
    template: Annotated[
        str | None,
        typer.Option(
            help="classify (a closed set of labels) or answer (free text); detected from the answers by default."
        ),
    ] = None,
    test: Annotated[str | None, typer.Option(help="Your file of records with answers to measure by.")] = None,
    pool: Annotated[str | None, typer.Option(help="Your file of inputs to choose from.")] = None,
    labelled: Annotated[str | None, typer.Option(help="Your file of records with answers to train on.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The column of the prompts; detected by default.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the answers; detected by default.")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Write the quickstart's files, and a config for a tiny model.")
    ] = False,
) -> None:
    """Create a workspace with a commented posttrain.yaml; with --test and --pool, for your files.

    The files stay where they are. Their columns, and the labels if there are few, are detected.
    """
    if example and any(value is not None for value in (template, test, pool, labelled, prompt, label)):
        raise UserError("the example brings its own files", where="--example", fix="leave out the other options")
    templates = resources.files("posttrain.cli") / "templates"
    if template is not None and not (templates / f"{template}.yaml").is_file():
        names = sorted(entry.name.removesuffix(".yaml") for entry in templates.iterdir())
        raise UserError(f"no template `{template}`", where="--template", fix=f"one of {', '.join(names)}")
    config = directory / CONFIG_FILE
    if config.exists():
        raise UserError("a workspace is here already", where=str(config), fix=f"posttrain run -w {directory}")
    if example:
        _write_example(directory)
        return
    columns = {key: name for key, name in (("prompt", prompt), ("completion", label)) if name is not None}
    files = DataFiles(test, pool, labelled)
    if columns and files == DataFiles(None, None, None):
        raise UserError("no file has these columns", where="--prompt, --label", fix="--test FILE --pool FILE")
    if files != DataFiles(None, None, None):
        # Before anything is written: a mistake leaves no folder behind.
        proposal = propose_config(files, columns, directory, template)
        _write(directory, proposal)
        return
    create_workspace(directory, (templates / f"{template or 'classify'}.yaml").read_bytes())
    print_line(
        f"made {directory}; put {', '.join(_required_files(config))} in it as {CONFIG_FILE} says, "
        f"then: posttrain run -w {directory}",
    )


def _write_example(directory: Path) -> None:
    folder = resources.files("posttrain.cli") / "example"
    # pip compiles the script among them, which leaves a folder.
    files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
    for name, content in files.items():
        path = directory / name
        if path.exists() and path.read_bytes() != content:
            raise UserError("another file is here already", where=str(path), fix="name a new folder")
    make_folder(directory)
    for name in sorted(files.keys() - {CONFIG_FILE}):
        write_atomically(directory / name, files[name])
    create_workspace(directory, files[CONFIG_FILE])
    print_line(f"made {directory}: {', '.join(sorted(files))}; next: posttrain run -w {directory}")


def _write(directory: Path, proposal: Proposal) -> None:
    labels, files = directory / LABELS_FILE, [CONFIG_FILE]
    if proposal.labels:
        content = "".join(f"{label}\n" for label in proposal.labels).encode()
        if labels.exists() and labels.read_bytes() != content:
            raise UserError("other labels are here already", where=str(labels), fix="move the file away")
        make_folder(directory)
        write_atomically(labels, content)
        files.append(f"{LABELS_FILE} ({counted(len(proposal.labels), 'label')}; add those that are missing)")
    create_workspace(directory, proposal.config.encode())
    for line in proposal.lines:
        print_line(line)
    print_line(f"made {directory}: {' and '.join(files)}, from the template `{proposal.template}`")
    print_line(
        f"next: describe the task in `task.system`; posttrain config check -w {directory}; posttrain run -w {directory}"
    )


def _required_files(config: Path) -> list[str]:
    values = Config.read(read_yaml(config), CONFIG_FILE)
    labels = [values.task.labels] if isinstance(values.task.labels, str) else []
    return [*labels, *values.data.files]
