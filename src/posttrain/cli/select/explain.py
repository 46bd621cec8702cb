"""``posttrain select explain``: explains why a record was answered, chosen or labelled as it was."""

from typing import Annotated, Any

import typer

from posttrain.cli.output import (
    RECORD_COLUMNS,
    JsonOption,
    one_line,
    print_json,
    print_line,
    print_table,
    record_cells,
)
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace


def explain(
    record: Annotated[str, typer.Argument(help="Id of a record or of its input, or the first characters of one.")],
    among: Annotated[
        int, typer.Option(min=2, help="Number of training records to score: those most similar to the record.")
    ] = 300,
    count: Annotated[int, typer.Option("--n", min=1, help="Records listed of each kind.")] = 5,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Explain an answer by training records, and say why a record was chosen and who labelled it.

    For a record of the pool: its scores in every round, and the labelled records nearest to it.
    """
    from posttrain.inspect.explanation import explain as explained

    with open_workspace(workspace, write=True) as (store, config):
        explanation = explained(store, config, record, among=among, count=count)
    if json:
        print_json(explanation)
        return
    target, kind = explanation["record"], _KINDS[explanation["kind"]]
    print_line(f"{target['id']} of {kind}, {target['source']}:{target['line']}: {one_line(target['input'])}")
    if explanation["kind"] == "evaluated":
        _show_influence(explanation)
        return
    if explanation["kind"] == "training":
        _show_label(explanation)
    _show_rounds(explanation["rounds"])
    if nearest := explanation.get("nearest"):
        rows = [[f"{row['similarity']:.3f}", *record_cells(row)] for row in nearest]
        print_table("labelled records nearest to it", ["cosine", *RECORD_COLUMNS], rows)


_KINDS = {"evaluated": "what models are measured on", "training": "the training set", "pool": "the pool"}


def _show_influence(explanation: dict[str, Any]) -> None:
    prediction = explanation["prediction"]
    sure = "" if prediction["confidence"] is None else f", of which it is sure to {prediction['confidence']:.3f}"
    answers = f"the champion answers `{prediction['predicted']}`{sure}; expected: `{prediction['expected']}`"
    print_line(f"suite {explanation['suite']}: {answers}")
    looked = explanation["looked_at"]
    # Influence is computed for the most similar records alone: the line says so, or it would read as all.
    which = "all" if looked == explanation["training"] else f"the {looked} most like it"
    training = f"{explanation['training']} training records"
    print_line(f"influence by EK-FAC on {which} of {training}; {explanation['parameters']}")
    rather = f"`{prediction['predicted']}`" + (
        f" rather than `{explanation['instead']}`" if explanation["instead"] is not None else ""
    )
    for side in ("towards", "against"):
        rows = [[f"{row['share']:+.1%}", *record_cells(row)] for row in explanation[side]]
        if rows:
            print_table(f"{side} {rather}", ["influence", *RECORD_COLUMNS], rows)
        else:
            print_line(f"{side} {rather}: none")


def _show_label(explanation: dict[str, Any]) -> None:
    by = explanation["labelled_by"]
    who = "a file" if by is None else by if isinstance(by, str) else f"{by['annotator']} in round {by['round']}"
    since = (
        "it is in the training set of no finished round"
        if explanation["since"] is None
        else f"in training sets since round {explanation['since']}"
    )
    print_line(f"labelled `{explanation['record']['completion']}` by {who}; {since}")


def _show_rounds(rounds: list[dict[str, Any]]) -> None:
    from posttrain.select.scores.registry import SCORES

    if not rounds:
        print_line("no round has scored it")
        return
    names = list(dict.fromkeys(name for entry in rounds for name in entry["scores"] or {} if name not in _ID_COLUMNS))
    rows = []
    for entry in rounds:
        chosen, scores = entry["chosen"], entry["scores"] or {}
        choice = f"{chosen['reason']}, rank {chosen['rank']}" if chosen else "not chosen"
        label = entry["labelled"]["label"] if entry["labelled"] else None
        why = chosen["why"] if chosen else None
        rows.append([entry["round"], choice, label, *(_nan_to_none(scores.get(name)) for name in names), why])
    print_table("what the rounds recorded of it", ["round", "chosen", "label", *names, "why"], rows)
    for name in names:
        if name in SCORES:
            print_line(f"{name}: {SCORES[name].summary}")


_ID_COLUMNS = ("id", "input_id", "source")


def _nan_to_none(value: Any) -> Any:
    # NaN alone differs from itself; an empty cell reads better than "nan".
    return None if isinstance(value, float) and value != value else value
