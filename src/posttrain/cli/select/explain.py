"""``posttrain select explain``: why a record was answered, chosen or labelled as it was."""

from typing import Annotated, Any

import typer

from posttrain.cli.output import RECORD_COLUMNS, JsonOption, console, one_line, print_json, print_table, record_cells
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace


def explain(
    record: Annotated[str, typer.Argument(help="A record's id, its input's, or the beginning of one.")],
    method: Annotated[
        str,
        typer.Option(
            help="How influence is computed: ekfac, conjugate_gradient, lissa, arnoldi, trak, or of the "
            "last weights tracin or less."
        ),
    ] = "ekfac",
    among: Annotated[
        int, typer.Option(min=2, help="Training records that are looked at: those most like the record.")
    ] = 300,
    count: Annotated[int, typer.Option("--n", min=1, help="Records named of each kind.")] = 5,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Explain an answer by training records, and why a record was chosen and by whom it was labelled.

    Of a record of the pool: its scores in every round, and the labelled records nearest to it.
    """
    from posttrain.inspect.explanation import explain as explained

    with open_workspace(workspace, write=True) as (store, config):
        found = explained(store, config, record, method=method, among=among, count=count)
    if json:
        print_json(found)
        return
    one = found["record"]
    _line(f"{one['id']} of {_KINDS[found['kind']]}, {one['source']}:{one['line']}: {one_line(one['input'])}")
    if found["kind"] == "evaluated":
        _show_influence(found)
        return
    if found["kind"] == "training":
        _show_label(found)
    _show_rounds(found["rounds"])
    if nearest := found.get("nearest"):
        rows = [[f"{row['similarity']:.3f}", *record_cells(row)] for row in nearest]
        print_table("labelled records nearest to it", ["cosine", *RECORD_COLUMNS], rows)


_KINDS = {"evaluated": "what models are measured on", "training": "the training set", "pool": "the pool"}


def _show_influence(found: dict[str, Any]) -> None:
    said = found["prediction"]
    sure = "" if said["confidence"] is None else f", of which it is sure to {said['confidence']:.3f}"
    _line(f"suite {found['suite']}: the champion answers `{said['predicted']}`{sure}; expected: `{said['expected']}`")
    looked = found["looked_at"]
    which = "all" if looked == found["training"] else f"the {looked} most like it"
    _line(f"influence by {found['method']} on {which} of {found['training']} training records; {found['parameters']}")
    rather = f"`{said['predicted']}`" + (f" rather than `{found['instead']}`" if found["instead"] is not None else "")
    for side in ("towards", "against"):
        rows = [[f"{row['share']:+.1%}", *record_cells(row)] for row in found[side]]
        if rows:
            print_table(f"{side} {rather}", ["influence", *RECORD_COLUMNS], rows)
        else:
            _line(f"{side} {rather}: none")


def _show_label(found: dict[str, Any]) -> None:
    by = found["labelled_by"]
    who = "a file" if by is None else by if isinstance(by, str) else f"{by['annotator']} in round {by['round']}"
    since = (
        "no finished round has learned from it" if found["since"] is None else f"learned since round {found['since']}"
    )
    _line(f"labelled `{found['record']['completion']}` by {who}; {since}")


def _show_rounds(rounds: list[dict[str, Any]]) -> None:
    from posttrain.select.scores.registry import SCORES

    if not rounds:
        _line("no round has scored it")
        return
    names = list(dict.fromkeys(name for told in rounds for name in told["scores"] or {} if name not in _ID_COLUMNS))
    rows = []
    for told in rounds:
        chosen, scores = told["chosen"], told["scores"] or {}
        choice = f"{chosen['reason']}, rank {chosen['rank']}" if chosen else "not chosen"
        label = told["labelled"]["label"] if told["labelled"] else None
        why = chosen["why"] if chosen else None
        rows.append([told["round"], choice, label, *(_nan_to_none(scores.get(name)) for name in names), why])
    print_table("what the rounds said of it", ["round", "chosen", "label", *names, "why"], rows)
    for name in names:
        if name in SCORES:
            _line(f"{name}: {SCORES[name].meaning}")


_ID_COLUMNS = ("id", "input_id", "source")


def _nan_to_none(value: Any) -> Any:
    return None if isinstance(value, float) and value != value else value


def _line(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
