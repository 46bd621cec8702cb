"""``posttrain select``: a batch of records worth a label, with the reasons."""

from collections import Counter
from typing import Annotated

import typer

from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, opened, print_json, print_table
from posttrain.store.errors import UserError


def select(
    context: typer.Context,
    workspace: WorkspaceOption = HERE,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Records wanted; label.per_round by default.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Strategy; select.strategy by default.")] = None,
    json: JsonOption = False,
) -> None:
    """Choose records of the pool that are worth a label, by the present champion; labels nothing."""
    if context.invoked_subcommand is not None:
        _check_nothing_before(context)
        return
    from posttrain.loop.outlook import as_detail
    from posttrain.loop.preview import preview_selection

    with opened(workspace, write=True) as (store, config):
        label = config.label.model_copy(update={"per_round": n} if n else {})
        found = preview_selection(store, config.model_copy(update={"label": label}), strategy)
    chosen = found.records
    if not chosen:
        raise UserError("every record of the pool is labelled", fix="posttrain data add FILE")
    if json:
        outlook = None if found.outlook is None else as_detail(found.outlook)
        print_json({"records": chosen, "strategy": found.strategy, "outlook": outlook, "labels_left": found.left})
        return
    rows = [[r["rank"], r["reason"], r["predicted"], r["id"], r["input"][:70], r["why"]] for r in chosen]
    print_table("", ["rank", "reason", "predicted", "record", "input", "why"], rows)
    counts = Counter(record["reason"] for record in chosen)
    parts = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
    console.print(f"{parts}; by {found.strategy}", markup=False)
    if found.left is not None:
        console.print(f"label.budget leaves {found.left} of them", markup=False)
    if found.outlook:
        console.print(found.outlook.sentence, markup=False, soft_wrap=True)
        if found.outlook.why:
            console.print(f"labelling more has stopped to pay: {found.outlook.why}", markup=False, soft_wrap=True)


def _check_nothing_before(context: typer.Context) -> None:
    """Raise a UserError if options stand before a verb that would not see them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            verb = str(context.invoked_subcommand)
            raise UserError(f"`--{name}` stands before `{verb}`, which does not see it", fix=f"put it behind `{verb}`")
