"""``posttrain select``: select a batch to label; other verbs about selection stand behind it."""

from collections import Counter
from typing import Annotated, ClassVar

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.verbs import LazyGroup, LazyVerb
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.select.selectors.registry import SELECTORS
from posttrain.select.strategy import AUTO
from posttrain.store.errors import UserError


class _Verbs(LazyGroup):
    verbs: ClassVar = {
        "compare": LazyVerb(
            "posttrain.cli.select.compare:compare",
            "Compare the learning curves of strategies on labelled records, and recommend one.",
        ),
        "value": LazyVerb(
            "posttrain.cli.select.value:value",
            "Estimate how much labelled records help a model predict each other; list the most harmful first.",
        ),
        "explain": LazyVerb(
            "posttrain.cli.select.explain:explain",
            "Explain an answer by training records, and say why a record was chosen and who labelled it.",
        ),
        "hard": LazyVerb(
            "posttrain.cli.select.hard:hard",
            "List training, pool and test records whose loss or entropy is above a percentile, the hardest first.",
        ),
        "adversarial": LazyVerb(
            "posttrain.cli.select.adversarial:adversarial",
            "Find small changes of prompts that change the champion's answer, where that was correct.",
        ),
    }


app = typer.Typer(name="select", cls=_Verbs)


@app.callback(invoke_without_command=True)
def select(
    context: typer.Context,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Batch size; label.per_round by default.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help=f"Strategy: {', '.join((AUTO, *SELECTORS.builtin))}; select.strategy by default.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show which pool records the champion would have you label next, without asking anyone."""
    # `select` is a verb and a group: typer calls this function before every verb of the group too.
    if context.invoked_subcommand is not None:
        _reject_misplaced_options(context)
        return
    from posttrain.inspect.preview import preview_selection

    with open_workspace(workspace, write=True) as (store, config):
        preview = preview_selection(store, config, strategy, n)
    records = preview.records
    if json:
        print_json(preview.to_json())
        return
    rows = [[r["rank"], r["reason"], r["predicted"], r["id"], r["input"][:70], r["why"]] for r in records]
    print_table("", ["rank", "reason", "predicted", "record", "input", "why"], rows)
    counts = Counter(record["reason"] for record in records)
    parts = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
    print_line(f"{parts}; by {preview.strategy}")
    if preview.remaining_labels is not None:
        print_line(f"label.budget leaves {preview.remaining_labels} of them")
    if preview.gain:
        print_line(preview.gain.sentence)
        if preview.gain.why:
            print_line(f"more labels no longer pay off: {preview.gain.why}")


def _reject_misplaced_options(context: typer.Context) -> None:
    """Raises a UserError if options stand before a verb that would not see them."""
    for name in context.params:
        # Typer would drop it in silence: `select --n 5 value` must not run with another number.
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            verb = str(context.invoked_subcommand)
            raise UserError(f"`--{name}` stands before `{verb}`, which does not see it", fix=f"put it behind `{verb}`")
