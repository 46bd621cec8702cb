"""``posttrain config``: shows, searches and checks posttrain.yaml."""

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer
import yaml

from posttrain.cli.output import JsonOption, one_line, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store
from posttrain.data.sets.pool_and_test import input_digests
from posttrain.data.versions.named_versions import resolve_versions
from posttrain.inspect.config_reference import config_keys, reference
from posttrain.loop.config import Config, load_config, read_yaml
from posttrain.loop.stages.collect import with_added_files
from posttrain.loop.stages.label import check_answers
from posttrain.loop.suites import check_suites
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError, suggest

app = typer.Typer(name="config", help="Show, search or check posttrain.yaml.", no_args_is_help=True)


@app.command()
def show(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    defaults: Annotated[bool, typer.Option("--defaults", help="Print all keys with defaults, as YAML.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the config as the file has it, or every key with its default."""
    if defaults:
        typer.echo(reference(Config))
        return
    load_config(workspace)
    values = Config.read(read_yaml(workspace / CONFIG_FILE), CONFIG_FILE).model_dump(mode="json")
    if json:
        print_json(values)
    else:
        typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


@app.command()
def keys(
    prefix: Annotated[str, typer.Argument(help="The beginning of the keys, such as train or train.optimizer.")] = "",
    json: JsonOption = False,
) -> None:
    """List the keys of posttrain.yaml with default, type and meaning."""
    known = list(config_keys(Config))
    matching = [entry for entry in known if entry.key.startswith(prefix)]
    if not matching:
        raise UserError(f"no key begins with `{prefix}`", fix=suggest(prefix, [entry.key for entry in known]))
    if json:
        print_json([asdict(entry) for entry in matching])
        return
    rows = [[entry.key, _default_text(entry.default), entry.type, entry.meaning] for entry in matching]
    print_table("", ["key", "default", "type", "meaning"], rows)


def _default_text(default: str | None) -> str:
    """Returns the default on a line; long lists, such as the steps of the data, are cut."""
    return "required" if default is None else one_line(default)


@app.command()
def check(workspace: WorkspaceOption = CURRENT_FOLDER) -> None:
    """Check the config, and the files and versions it names."""
    config = load_config(workspace)
    data = with_added_files(config.data, workspace)
    stored = (workspace / ".posttrain" / "format.json").is_file()
    with open_store(workspace) if stored else nullcontext() as store:
        input_digests(data, workspace, resolve_versions(data.files, workspace, store))
    check_answers(config, workspace)
    check_suites(config, workspace)
    print_line("the config is right")
