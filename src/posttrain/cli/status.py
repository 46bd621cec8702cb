"""``posttrain status``: show where the loop stands."""

from typing import Any

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace, waiting_text
from posttrain.inspect.champion import MEND
from posttrain.inspect.status import status as loop_status

_MAIN_METRICS = (
    *("accuracy", "record_f1", "micro_f1", "macro_f1", "mean_absolute_error", "token_f1", "score"),
    *("preference_accuracy", "perplexity", "latency_p50"),
)


def status(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """Show the rounds, the champion, and what the loop waits for."""
    with open_workspace(workspace, checked=False) as (store, config):
        state = loop_status(store, config)
        if json:
            print_json(state)
            return
        print_rounds(state)
        champion = state["champion"]
        print_line(
            f"champion: {champion['id']} of round {champion['round']}, at {champion['path']}"
            if champion
            else "no champion yet",
        )
        if champion:
            print_damage(champion["damage"])
        if state["canary"]:
            print_line(state["canary"]["line"])
            for problem in state["canary"]["problems"]:
                print_line(problem)
        if state["waiting"]:
            print_line(waiting_text(state["waiting"], workspace))


def print_damage(problems: list[str]) -> None:
    """Prints what is wrong with the champion's files, if anything is."""
    if problems:
        print_line(f"the champion is damaged: {'; '.join(problems)}; {MEND}")


def print_rounds(state: dict[str, Any]) -> None:
    """Prints the table of rounds of a loop's status, and the champion's metrics on all test records."""
    rounds = state["rounds"]
    # Of the first round that has any: a suite that was added later must not change the columns.
    names = list(next((entry["metrics"] for entry in rounds if entry["metrics"]), {}))
    metrics = [name for name in names if name in _MAIN_METRICS] or names[:3]
    rows = [_round_row(entry, metrics) for entry in rounds]
    print_table("", ["round", "labels", *metrics, "decision", "seconds"], rows)
    if state["final"]:
        figures = ", ".join(
            f"{name} {state['final']['metrics'][name]:.3f}" for name in metrics if name in state["final"]["metrics"]
        )
        print_line(f"champion on all test records: {figures}")
    if state["rollback"]:
        print_line(state["rollback"]["sentence"])
    latest: dict[str, list[str]] = {}
    for entry in rounds:
        for name, sentences in entry["sentences"].items():
            latest.pop(name, None)
            for sentence in sentences:
                print_line(f"round {entry['round']}: {sentence}")
        for name, sentences in entry["latest"].items():
            latest[name] = [f"round {entry['round']}: {sentence}" for sentence in sentences]
    for lines_of in latest.values():
        print_line("\n".join(lines_of))


def _round_row(entry: dict[str, Any], metrics: list[str]) -> list[Any]:
    seconds = round(entry["seconds"]) if entry["seconds"] is not None else None
    decision = entry["decision"] or entry["status"]
    return [
        entry["round"],
        entry["labels"],
        *[entry["metrics"].get(name) for name in metrics],
        decision,
        seconds,
    ]
