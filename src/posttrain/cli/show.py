"""``posttrain show``: shows anything by its id, with its lineage."""

from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.inspect.show import show as find
from posttrain.store.message import counted


def show(
    id: Annotated[str, typer.Argument(help="An artifact, run, round, record, name@vN, or `champion`.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Show any artifact, run, round or record with its lineage."""
    with open_workspace(workspace, checked=False) as (store, config):
        result = find(store, id, config)
    if json:
        print_json(result)
    else:
        _PRINT[result["type"]](result)


def _artifact(artifact: dict[str, Any]) -> None:
    print_line(f"{artifact['id']}  {artifact['kind']}  {artifact['size'] / 1e6:.1f} MB  {' '.join(artifact['names'])}")
    if artifact["damage"]:
        print_line(f"damaged: {'; '.join(artifact['damage'])}; posttrain verify says what to do")
    # One is enough: the others gave the same bytes.
    for run in artifact["runs"][:1]:
        print_line(
            f"made by {run['stage']} ({run['id']}) in round {run['round']}, seed {run['seed']},"
            f" version {run['code_version']}"
        )
    for deployment in artifact.get("deployments", []):
        print_line(f"{deployment['action']} in round {deployment['round']}: {deployment['reason']}")
    print_table("made from", ["depth", "artifact", "by"], _relatives(artifact["ancestors"]))
    if len(artifact["descendants"]) > 1:
        print_table("led to", ["depth", "artifact", "by"], _relatives(artifact["descendants"]))
    if trained := artifact.get("trained_on"):
        records = trained["records"]
        rows = [[record["id"], record["source"], record["line"], record["completion"]] for record in records[:_ROWS]]
        print_table(
            f"trained on {counted(len(records), 'record')} of {trained['dataset']}",
            ["record", "file", "line", "answer"],
            rows,
        )
        if len(records) > _ROWS:
            print_line(f"… and {len(records) - _ROWS} more (--json lists all)")


_ROWS = 20


def _relatives(relatives: list[dict[str, Any]]) -> list[list[Any]]:
    return [
        [relative["depth"], relative["artifact"]["id"], relative["run"]["stage"] if relative["run"] else ""]
        for relative in relatives
        if relative["depth"]
    ]


def _record(result: dict[str, Any]) -> None:
    record = result["record"]
    print_line(f"{record['id']}  {record['source']}:{record['line']}")
    for turn in record["prompt"] or []:
        print_line(f"{turn['role']}: {turn['content']}")
    mark = record["meta"].get("pseudo")
    answer = f"pseudo-label of the model {mark['teacher']}" if mark else "answer"
    print_line(f"{answer}: {record['completion']}" if record["completion"] else record["text"] or "no answer yet")
    for dataset in result["in"]:
        print_line(f"in {dataset['name']} {dataset['dataset']}")
    for dataset in result["rejected_from"]:
        print_line(
            f"rejected from {dataset['name']} {dataset['dataset']} by {dataset['step']}:"
            f" {dataset['reason']} {dataset['detail'] or ''}"
        )
    for model in result["models"]:
        print_line(f"trained {model}")


def _round(entry: dict[str, Any]) -> None:
    decision = (entry["decision"] or {}).get("action", entry["status"])
    models = {"candidate": entry["candidate"], "champion before": entry["champion_before"]}
    text = ", ".join(f"{role} {model}" for role, model in models.items() if model)
    print_line(f"round {entry['number']}: {decision}{f'; {text}' if text else ''}")
    for rule in (entry["decision"] or {}).get("rules", []):
        outcome = "holds" if rule["holds"] else "fails"
        print_line(f"  {outcome}: {rule['section']}: {rule['rule']}  ({rule['values']})")
    for name, interval in (entry["decision"] or {}).get("intervals", {}).items():
        print_line(
            f"  gain in {name}: {interval['difference']:+.4f},"
            f" interval {interval['low']:+.4f} to {interval['high']:+.4f},"
            f" {interval['differing']:,} of {interval['n']:,} records differ"
        )
    rows = [[id, reason] for id, reason in entry["unlabelled"].items()]
    if rows:
        print_table("without a label", ["record", "reason"], rows[:_ROWS])
    if len(rows) > _ROWS:
        print_line(f"… and {len(rows) - _ROWS} more (--json lists all)")
    for sentences in (*entry["sentences"].values(), *entry["latest"].values(), entry["details"]):
        for sentence in sentences:
            print_line(f"  {sentence}")
    rows = [[run["stage"], run["status"], run["seconds"], run["output"], run["id"]] for run in entry["runs"]]
    print_table("", ["stage", "status", "seconds", "artifact", "run"], rows)


def _run(run: dict[str, Any]) -> None:
    for key, value in run.items():
        if key != "type":
            print_line(f"{key}: {value}")


_PRINT = {"artifact": _artifact, "record": _record, "round": _round, "run": _run}
