"""``posttrain status``: where the loop stands."""

from typing import Any

import typer

from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, opened, print_json, print_table
from posttrain.loop.config import Config
from posttrain.loop.status import status as loop_status
from posttrain.store.workspace import Workspace


def status(workspace: WorkspaceOption = HERE, json: JsonOption = False) -> None:
    """Where the loop stands and what it waits for."""
    with opened(workspace, checked=False) as (store, config):
        state = loop_status(store, config)
        if json:
            print_json(state)
            return
        print_rounds(store, config)
        champion = state["champion"]
        console.print(
            f"champion: {champion['id']} of round {champion['round']}, at {champion['path']}"
            if champion
            else "no champion yet",
            markup=False,
            soft_wrap=True,
        )
        if state["waiting"]:
            console.print(f"waiting for {state['waiting']}", markup=False, soft_wrap=True)


def print_rounds(store: Workspace, config: Config) -> None:
    """The table of rounds, and the champion's figures on all test records."""
    state = loop_status(store, config)
    rounds = state["rounds"]
    names = list(next((entry["metrics"] for entry in rounds if entry["metrics"]), {}))
    shown = [name for name in names if name in _SHOWN] or names[:3]
    rows = [_row(entry, shown) for entry in rounds]
    print_table("", ["round", "labels", *shown, "decision", "seconds"], rows)
    if state["final"]:
        figures = ", ".join(
            f"{name} {state['final']['metrics'][name]:.3f}" for name in shown if name in state["final"]["metrics"]
        )
        console.print(f"champion on all test records: {figures}", markup=False)


_SHOWN = ("accuracy", "macro_f1", "token_f1", "score", "perplexity", "latency_p50")


def _row(entry: dict[str, Any], shown: list[str]) -> list[Any]:
    seconds = round(entry["seconds"]) if entry["seconds"] is not None else None
    decision = entry["decision"] or entry["status"]
    return [
        entry["round"],
        entry["labels"],
        *[entry["metrics"].get(name) for name in shown],
        decision,
        seconds,
    ]


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(status)
