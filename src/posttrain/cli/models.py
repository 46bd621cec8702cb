"""``posttrain models``: lists, shows, promotes, rolls back and exports models."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.show import show as show_anything
from posttrain.cli.status import print_damage
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.inspect.champion import champion_problems
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.state import RoundState
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, remove_tree
from posttrain.store.workspace import Workspace

app = typer.Typer(name="models", help="List, promote, roll back and export models.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="A model's id or the beginning of one, or `champion`.")]


@app.command(name="list")
def list_models(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """List all models with their round, decision and main metric."""
    with open_workspace(workspace, checked=False) as (store, _):
        champion = ModelRegistry(store).champion
        damage = champion_problems(store, champion.model_id) if champion else []
        candidates = {entry.candidate: entry for entry in store.metadata.rounds() if entry.candidate}
        rows: list[dict[str, Any]] = []
        for artifact in store.metadata.artifacts("model"):
            # A model may be of no round: a base model that the config names since, for one.
            entry = candidates.get(artifact.id)
            state = RoundState.from_row(entry) if entry else RoundState()
            rows.append(
                {
                    "id": artifact.id,
                    "round": entry.number if entry else None,
                    "decision": state.action,
                    "champion": bool(champion and champion.model_id == artifact.id),
                    "damage": damage if champion and champion.model_id == artifact.id else [],
                    "megabytes": round(artifact.size / 1e6, 1),
                    "metrics": state.metrics or {},
                }
            )
    if json:
        print_json(rows)
        return
    table = [
        [
            r["id"],
            r["round"],
            next(iter(r["metrics"].values()), None),
            r["decision"],
            "champion" if r["champion"] else "",
            r["megabytes"],
        ]
        for r in rows
    ]
    print_table("", ["model", "round", "main metric", "decision", "", "MB"], table)
    print_damage(damage)


@app.command()
def show(model: Model, workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """Show a model and its lineage down to its training records."""
    show_anything(model, workspace, json)


@app.command()
def promote(
    model: Model,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    reason: Annotated[str, typer.Option(help="Reason, kept in the registry.")] = "by hand",
) -> None:
    """Make a model the champion, bypassing the gate."""
    with open_workspace(workspace, write=True, checked=False) as (store, config):
        deployment = ModelRegistry(store, config.deploy).promote(_resolve(store, model), round=None, reason=reason)
        print_line(f"champion: {deployment.model_id}, at {store.champion_path}")


@app.command()
def rollback(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    to: Annotated[
        str | None, typer.Option(help="The earlier champion: `round 2`, a model's id or the beginning of one.")
    ] = None,
    number: Annotated[str | None, typer.Argument(hidden=True)] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Roll back to the base model without a question.")] = False,
    reason: Annotated[str, typer.Option(help="Reason, kept in the registry.")] = "by hand",
) -> None:
    """Put an earlier champion back in service at once.

    Without --to it undoes the last promotion. The same command again finishes a rollback that was killed and never
    starts a second one: to go further back, name the model with --to.
    """
    # `--to round 2` without quotes reaches here as an option and an argument.
    if number is not None:
        if to != "round":
            raise UserError(f"unexpected argument `{number}`", fix="name the model with --to")
        to = f"round {number}"
    # Unchecked: in an emergency a missing pool file must not stand between the user and the earlier model.
    with open_workspace(workspace, write=True, checked=False) as (store, config):
        registry = ModelRegistry(store, config.deploy)
        plan = registry.plan_rollback(None if to is None else _model_of(store, to))
        change = f"{_round_text(store, plan.source)} → {_round_text(store, plan.target)}"
        if not (plan.done or yes) and registry.is_base(plan.target):
            _confirm_base(change)
        plan = registry.rollback(reason, to=plan.target)
        if not plan.done:
            print_line(change)
        elif plan.source == plan.target:
            print_line(f"{_round_text(store, plan.target)} is the champion already")
        else:
            further = "" if to else "; to go further back, name the model with --to"
            print_line(f"{change} was done before{further}")
        print_line(f"champion: {plan.target}, at {store.champion_path}")


def _model_of(store: Workspace, text: str) -> str:
    """Returns the model that ``round 2``, ``2`` or an id names."""
    number = text.removeprefix("round").strip()
    if not (number.isascii() and number.isdigit()):
        return _resolve(store, text)
    model = {str(row.number): row.candidate for row in store.metadata.rounds()}.get(number)
    if model is None:
        raise UserError(f"round {number} trained no model", where="--to", fix="posttrain models list")
    return model


def _round_text(store: Workspace, model: str) -> str:
    """Names a model by its round and main metric, such as ``round 2 (33.0%)``; by its id if it is of no round."""
    # Here, as the other verbs need nothing of the pages.
    from posttrain.web.formatting import metric_text

    states = {row.number: RoundState.from_row(row) for row in store.metadata.rounds()}
    number = next((number for number, state in reversed(states.items()) if state.candidate == model), None)
    if number is None:
        return model
    metric, value = next(iter((states[number].metrics or {}).items()), ("", None))
    return f"round {number}" if value is None else f"round {number} ({metric_text(metric, value)})"


def _confirm_base(change: str) -> None:
    """Asks before the untrained base model goes in service.

    Raises:
        UserError: nobody can be asked, or the answer is no.
    """
    what = f"{change} puts the untrained base model in service"
    if not sys.stdin.isatty():
        raise UserError(what, fix="add --yes if that is meant, or name another model with --to")
    if not typer.confirm(f"{what}. Roll back?"):
        raise UserError("not rolled back", fix="posttrain models list shows the models")


@app.command()
def export(
    model: Model,
    directory: Annotated[Path, typer.Argument(help="A new folder.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Copy a model in Hugging Face layout into a new folder."""
    with open_workspace(workspace, checked=False) as (store, _):
        source = store.artifacts.path(_resolve(store, model))
        if directory.exists():
            raise UserError("the folder exists already", where=str(directory), fix="remove it or name another")
        # Copied under another name and renamed, so that a killed export leaves no half model under the final name.
        partial = directory.with_name(f".{directory.name}.partial")
        with disk_errors(directory):
            remove_tree(partial)
            # By content alone: an artifact's files are read-only, and the copy is the user's own.
            ignored = shutil.ignore_patterns("manifest.json")
            shutil.copytree(source, partial, ignore=ignored, copy_function=shutil.copyfile)
            partial.rename(directory)
    print_line(f"wrote {directory}")


def _resolve(store: Workspace, text: str) -> str:
    champion = ModelRegistry(store).champion
    if text == "champion" and champion is not None:
        return champion.model_id
    id = store.metadata.resolve(text)
    row = store.metadata.artifact(id)
    if row is None or row.kind != "model":
        raise UserError(f"`{text}` is no model", fix="posttrain models list")
    return id
