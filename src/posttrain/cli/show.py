"""``posttrain show``: anything by its id, with its lineage."""

from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, console, print_json, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.inspect.show import show as find


def show(
    id: Annotated[str, typer.Argument(help="An artifact, run, round, record, name@vN, or `champion`.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Show any artifact, run, round or record with its lineage."""
    with open_workspace(workspace, checked=False) as (store, _):
        found = find(store, id)
    if json:
        print_json(found)
    else:
        _PRINT[found["type"]](found)


def _artifact(found: dict[str, Any]) -> None:
    _line(f"{found['id']}  {found['kind']}  {found['size'] / 1e6:.1f} MB  {' '.join(found['names'])}")
    for run in found["runs"][:1]:
        _line(
            f"made by {run['stage']} ({run['id']}) in round {run['round']}, seed {run['seed']},"
            f" version {run['code_version']}"
        )
    for deployment in found.get("deployments", []):
        _line(f"{deployment['action']} in round {deployment['round']}: {deployment['reason']}")
    print_table("made from", ["depth", "artifact", "by"], _relatives(found["ancestors"]))
    if len(found["descendants"]) > 1:
        print_table("led to", ["depth", "artifact", "by"], _relatives(found["descendants"]))
    if trained := found.get("trained_on"):
        records = trained["records"]
        rows = [[record["id"], record["source"], record["line"], record["completion"]] for record in records[:_ROWS]]
        print_table(
            f"trained on {len(records)} records of {trained['dataset']}",
            ["record", "file", "line", "answer"],
            rows,
        )
        if len(records) > _ROWS:
            _line(f"… and {len(records) - _ROWS} more (--json lists all)")


_ROWS = 20


def _relatives(relatives: list[dict[str, Any]]) -> list[list[Any]]:
    return [
        [relative["depth"], relative["artifact"]["id"], relative["run"]["stage"] if relative["run"] else ""]
        for relative in relatives
        if relative["depth"]
    ]


def _record(found: dict[str, Any]) -> None:
    record = found["record"]
    _line(f"{record['id']}  {record['source']}:{record['line']}")
    for turn in record["prompt"] or []:
        _line(f"{turn['role']}: {turn['content']}")
    _line(f"answer: {record['completion']}" if record["completion"] else record["text"] or "no answer yet")
    for place in found["in"]:
        _line(f"in {place['name']} {place['dataset']}")
    for place in found["rejected_from"]:
        _line(
            f"rejected from {place['name']} {place['dataset']} by {place['step']}:"
            f" {place['reason']} {place['detail'] or ''}"
        )
    for model in found["models"]:
        _line(f"trained {model}")


def _round(found: dict[str, Any]) -> None:
    decision = (found["decision"] or {}).get("action", found["status"])
    _line(
        f"round {found['number']}: {decision}; candidate {found['candidate']},"
        f" champion before {found['champion_before']}"
    )
    for rule in (found["decision"] or {}).get("rules", []):
        found_to = "holds" if rule["holds"] else "fails"
        _line(f"  {found_to}: {rule['section']}: {rule['rule']}  ({rule['values']})")
    for name, interval in (found["decision"] or {}).get("intervals", {}).items():
        _line(
            f"  gain in {name}: {interval['difference']:+.4f},"
            f" interval {interval['low']:+.4f} to {interval['high']:+.4f}, n = {interval['n']}"
        )
    rows = [[run["stage"], run["status"], run["seconds"], run["output"], run["id"]] for run in found["runs"]]
    print_table("", ["stage", "status", "seconds", "artifact", "run"], rows)


def _run(found: dict[str, Any]) -> None:
    for key, value in found.items():
        if key != "type":
            _line(f"{key}: {value}")


def _line(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


_PRINT = {"artifact": _artifact, "record": _record, "round": _round, "run": _run}
