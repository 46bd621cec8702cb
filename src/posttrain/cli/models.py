"""``posttrain models``: lists, shows, promotes, rolls back and exports models."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.show import show as show_anything
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
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
    reason: Annotated[str, typer.Option(help="Reason, kept in the registry.")] = "by hand",
) -> None:
    """Put the previous champion back in service at once."""
    # Unchecked: in an emergency a missing pool file must not stand between the user and the earlier model.
    with open_workspace(workspace, write=True, checked=False) as (store, config):
        deployment = ModelRegistry(store, config.deploy).rollback(reason)
        print_line(f"champion: {deployment.model_id}, at {store.champion_path}")


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
            shutil.copytree(source, partial, ignore=shutil.ignore_patterns("manifest.json"))
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
