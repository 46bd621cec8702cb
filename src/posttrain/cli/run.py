"""``posttrain run`` and ``posttrain status``: run the loop, and show where it stands."""

from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.inspect.status import status as loop_status
from posttrain.loop.config import Config
from posttrain.store.workspace import Workspace

_MAIN_METRICS = ("accuracy", "macro_f1", "token_f1", "score", "perplexity", "latency_p50")


def run(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    rounds: Annotated[
        int | None, typer.Option(min=0, help="Number of the last round; `rounds` of the config by default.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage of the round in progress.")] = None,
    urgent: Annotated[bool, typer.Option("--urgent", help="Set `urgent` to 1 in the triggers.")] = False,
    baseline: Annotated[
        str | None, typer.Option(help="random: also run the same loop with randomly drawn records, to compare.")
    ] = None,
) -> None:
    """Run the loop; resume where it stopped."""
    from posttrain.inspect.random_baseline import check_baseline, run_baseline
    from posttrain.loop.loop import Loop

    with open_workspace(workspace, write=True) as (store, config):
        if baseline:
            check_baseline(config, baseline)
        waiting = Loop(store, config).run(rounds, until, urgent)
        # After the loop, in its data of today and for as many rounds as it has done.
        comparison = run_baseline(store, config) if baseline else None
        print_rounds(store, config)
    if comparison:
        print_line(comparison.conclusion)
    if waiting:
        print_line(f"waiting for {waiting}")


def status(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """Show the rounds, the champion, and what the loop waits for."""
    with open_workspace(workspace, checked=False) as (store, config):
        state = loop_status(store, config)
        if json:
            print_json(state)
            return
        print_rounds(store, config)
        champion = state["champion"]
        print_line(
            f"champion: {champion['id']} of round {champion['round']}, at {champion['path']}"
            if champion
            else "no champion yet",
        )
        if state["waiting"]:
            print_line(f"waiting for {state['waiting']}")


def print_rounds(store: Workspace, config: Config) -> None:
    """Prints the table of rounds, and the champion's metrics on all test records."""
    state = loop_status(store, config)
    rounds = state["rounds"]
    # Of the first round that has any: a suite that was added later must not change the columns.
    names = list(next((entry["metrics"] for entry in rounds if entry["metrics"]), {}))
    shown = [name for name in names if name in _MAIN_METRICS] or names[:3]
    rows = [_round_row(entry, shown) for entry in rounds]
    print_table("", ["round", "labels", *shown, "decision", "seconds"], rows)
    if state["final"]:
        figures = ", ".join(
            f"{name} {state['final']['metrics'][name]:.3f}" for name in shown if name in state["final"]["metrics"]
        )
        print_line(f"champion on all test records: {figures}")


def _round_row(entry: dict[str, Any], shown: list[str]) -> list[Any]:
    seconds = round(entry["seconds"]) if entry["seconds"] is not None else None
    decision = entry["decision"] or entry["status"]
    return [
        entry["round"],
        entry["labels"],
        *[entry["metrics"].get(name) for name in shown],
        decision,
        seconds,
    ]
