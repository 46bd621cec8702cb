"""``posttrain models``: lists, shows, promotes, rolls back, exports and pushes models, and runs canaries."""

import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.show import show as show_anything
from posttrain.cli.status import print_damage
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.inspect.model_card import model_card
from posttrain.inspect.models import (
    check_repository,
    export_model,
    list_models,
    push_model,
)
from posttrain.loop.model_registry import ModelRegistry, find_model
from posttrain.loop.state import RoundState
from posttrain.store.errors import UserError
from posttrain.store.rows import Canary
from posttrain.store.workspace import Workspace

app = typer.Typer(name="models", help="List, promote, roll back, export and push models.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="`champion`, `round 2`, or the beginning of a model's id.")]


@app.command(name="list")
def list_(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """List all models with their round, decision and main metric."""
    with open_workspace(workspace, checked=False) as (store, _):
        rows = list_models(store)
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
    print_damage([line for r in rows for line in r["damage"]])


@app.command()
def show(model: Model, workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """Show a model and its lineage down to its training records."""
    show_anything(model, workspace, json)


@app.command()
def promote(
    model: Model,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    reason: Annotated[str, typer.Option(help="Reason, kept in the registry.")] = "by hand",
    canary: Annotated[
        str | None,
        typer.Option(help="Share of the requests, such as 10%: outcomes decide whether it becomes the champion."),
    ] = None,
) -> None:
    """Make a model the champion, bypassing the gate; with --canary for a share of the requests first."""
    share = None if canary is None else _share_of(canary)
    with open_workspace(workspace, write=True, checked=False) as (store, config):
        if share is not None:
            from posttrain.loop.canary import describe_canary, start_canary
            from posttrain.loop.traffic_split import split_path

            started = start_canary(store, config, find_model(store, model), share, reason)
            print_line(describe_canary(started))
            print_line(f"servers read the split in {split_path(store)}; feedback names its arm: docs/server.md")
            return
        running = ModelRegistry(store).running_canary
        deployment = ModelRegistry(store, config.deploy).promote(find_model(store, model), round=None, reason=reason)
        _print_ended(store, running)
        print_line(f"champion: {deployment.model_id}, at {store.champion_path}")


@app.command(name="canary")
def show_canary(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    stop: Annotated[bool, typer.Option("--stop", help="End the canary; the champion stays.")] = False,
    reason: Annotated[str, typer.Option(help="Reason of the end, kept in the registry.")] = "by hand",
    json: JsonOption = False,
) -> None:
    """Show the canary that runs, or the last one: its outcomes by arm, the evidence, and what would decide it."""
    from posttrain.loop.canary import describe_canary, judge

    with open_workspace(workspace, write=stop, checked=False) as (store, config):
        registry = ModelRegistry(store, config.deploy)
        canary = registry.last_canary
        if canary is None or (stop and canary.status != "running"):
            what = "no canary runs" if canary else "there was no canary yet"
            raise UserError(what, fix="posttrain models promote MODEL --canary 10%")
        numbers = canary.detail.get("judgement")
        if canary.status == "running":
            # As of now, and not of the last run: feedback may have come since.
            numbers = judge(store, canary, config.deploy.canary).as_dict()
        if stop:
            canary = registry.end_canary(canary.id, "stopped", reason, {**canary.detail, "judgement": numbers})
    if json:
        row = {name: value for name, value in asdict(canary).items() if name != "detail"}
        print_json({**row, "name": canary.name, "judgement": numbers})
        return
    current = replace(canary, detail={**canary.detail, "judgement": numbers})
    print_line(describe_canary(current))
    if numbers is None:
        return
    arms = [numbers["canary"], numbers["champion"]]
    rows = [
        [arm["name"], arm["model"], f"{100 * arm['share']:g}%", arm["good"], arm["total"], _percent(arm)]
        for arm in arms
    ]
    print_table("", ["arm", "model", "share", "good", "outcomes", "good share"], rows)
    for problem in numbers["problems"]:
        print_line(problem)
    if numbers["status"] != "running" and canary.status == "running":
        print_line("decided: the next posttrain run carries it out")
    elif canary.status == "running":
        rules = config.deploy.canary
        needed = f"{numbers['test']['needed']:g}"
        print_line(
            f"evidence that it is worse: {numbers['test']['worse']:.3g}; rolled back from {needed} on\n"
            f"evidence that it is not worse by {100 * rules.margin:g} points: {numbers['test']['not_worse']:.3g}; "
            f"promoted from {needed} on\n"
            f"ends undecided after {rules.max_outcomes:,} outcomes or {rules.days:g} days, and the champion stays; "
            f"{rules.min_outcomes} outcomes of each arm at least"
        )


def _percent(arm: dict[str, Any]) -> str | None:
    return f"{arm['good'] / arm['total']:.1%}" if arm["total"] else None


def _share_of(text: str) -> float:
    """Reads a share such as ``10%`` or ``0.1``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise UserError(
            f"`{text}` is not a share", where="--canary", fix="a share above 0% and below 100%, such as 10%"
        )
    return share


def _print_ended(store: Workspace, running: Canary | None) -> None:
    """Says that the canary that ran before has ended, if it has."""
    from posttrain.loop.canary import describe_canary

    last = ModelRegistry(store).last_canary
    if running is not None and last is not None and last.status != "running":
        print_line(describe_canary(last))


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

    Without --to it undoes the last promotion, or ends the canary that runs. The same command again finishes a rollback
    that was killed and never starts a second one: to go further back, name the model with --to.
    """
    # `--to round 2` without quotes reaches here as an option and an argument.
    if number is not None:
        if to != "round":
            raise UserError(f"unexpected argument `{number}`", fix="name the model with --to")
        to = f"round {number}"
    # Unchecked: in an emergency a missing pool file must not stand between the user and the earlier model.
    with open_workspace(workspace, write=True, checked=False) as (store, config):
        registry = ModelRegistry(store, config.deploy)
        running = registry.running_canary
        plan = registry.plan_rollback(None if to is None else find_model(store, to))
        change = f"{_round_text(store, plan.source)} → {_round_text(store, plan.target)}"
        if not (plan.done or plan.ends_canary or yes) and registry.is_base(plan.target):
            _confirm_base(change)
        plan = registry.rollback(reason, to=None if plan.ends_canary else plan.target)
        _print_ended(store, running)
        if plan.ends_canary:
            further = "the canary was rolled back before" if plan.done else "the champion stays"
            print_line(f"{further}; to put an earlier champion in service, name it with --to")
        elif not plan.done:
            print_line(change)
        elif plan.source == plan.target:
            print_line(f"{_round_text(store, plan.target)} is the champion already")
        else:
            further = "" if to else "; to go further back, name the model with --to"
            print_line(f"{change} was done before{further}")
        print_line(f"champion: {plan.target}, at {store.champion_path}")


def _round_text(store: Workspace, model: str) -> str:
    """Names a model by its round and main metric, such as ``round 2 (33.0%)``; by its id if it is of no round."""
    # Here, as the other verbs need nothing of the pages.
    from posttrain.report.formatting import metric_text

    states = {row.number: RoundState.from_row(row) for row in store.metadata.rounds()}
    number = next((number for number, state in reversed(states.items()) if state.candidate == model), None)
    if number is None:
        return model
    metric, value = next(iter((states[number].metrics or {}).items()), ("", None))
    return f"round {number}" if value is None else f"round {number} ({metric_text(metric, value)})"


def _confirm_base(change: str) -> None:
    """Asks before the base model, which is not trained on the task, goes in service.

    Raises:
        UserError: nobody can be asked, or the answer is no.
    """
    what = f"{change} puts the base model in service, which is not trained on your task"
    if not sys.stdin.isatty():
        raise UserError(what, fix="add --yes if that is meant, or name another model with --to")
    if not typer.confirm(f"{what}. Roll back?"):
        raise UserError("not rolled back", fix="posttrain models list shows the models")


@app.command()
def export(
    model: Model,
    directory: Annotated[Path, typer.Argument(help="A new folder.")],
    card: Annotated[bool, typer.Option("--card", help="Write a model card, README.md, into it.")] = False,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Copy a model in Hugging Face layout into a new folder."""
    with open_workspace(workspace, checked=False) as (store, config):
        id = find_model(store, model)
        export_model(store, id, directory, model_card(store, config, id) if card else None)
    print_line(f"wrote {directory}")


@app.command()
def push(
    model: Model,
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the Hugging Face Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a repository that only its owner sees.")] = False,
    dry_run: Annotated[
        Path | None, typer.Option(help="Write what would be uploaded into this new folder; needs no network.")
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Upload a model to the Hugging Face Hub, with a card that states data, metrics, gate and lineage."""
    check_repository(repository)
    # A dry run writes nothing into the workspace.
    with open_workspace(workspace, write=dry_run is None, checked=False) as (store, config):
        id = find_model(store, model)
        if dry_run is not None:
            export_model(store, id, dry_run, model_card(store, config, id, repository))
            print_line(f"wrote {dry_run}, as it would be uploaded to {repository}")
            return
        print_line(f"pushed {id}: {push_model(store, config, id, repository, private=private)}")
