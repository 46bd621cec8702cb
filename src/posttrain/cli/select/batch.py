"""``posttrain select`` and ``posttrain select compare``: chooses a batch to label, and compares strategies."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from posttrain.cli.output import JsonOption, console, print_json, print_table
from posttrain.cli.verbs import LazyGroup, LazyVerb
from posttrain.cli.workspace import CURRENT_FOLDER, ColumnOption, WorkspaceOption, merge_columns, open_workspace
from posttrain.select.strategy import AUTO
from posttrain.store.errors import UserError

_DEFAULT_STRATEGIES = "auto,random,margin,uncertain_diverse,typiclust,facility_location,badge"


class _Verbs(LazyGroup):
    verbs: ClassVar = {
        "compare": LazyVerb(
            "posttrain.cli.select.batch:compare",
            "Compare the learning curves of strategies on labelled records, and recommend one.",
        ),
        "value": LazyVerb(
            "posttrain.cli.select.value:value",
            "Estimate what labelled records are worth for predicting each other, the worst first.",
        ),
        "explain": LazyVerb(
            "posttrain.cli.select.explain:explain",
            "Explain an answer by training records, and why a record was chosen and by whom it was labelled.",
        ),
        "adversarial": LazyVerb(
            "posttrain.cli.select.adversarial:adversarial",
            "Find prompts close to ones the champion answers correctly that it answers differently.",
        ),
    }


app = typer.Typer(name="select", cls=_Verbs)


@app.callback(invoke_without_command=True)
def select(
    context: typer.Context,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Records wanted; label.per_round by default.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Strategy; select.strategy by default.")] = None,
    json: JsonOption = False,
) -> None:
    """Choose pool records worth labelling, scored by the champion; labels nothing."""
    if context.invoked_subcommand is not None:
        _reject_misplaced_options(context)
        return
    from posttrain.inspect.preview import preview_selection
    from posttrain.loop.stages.select import gain_detail

    with open_workspace(workspace, write=True) as (store, config):
        label = config.label.model_copy(update={"per_round": n} if n else {})
        found = preview_selection(store, config.model_copy(update={"label": label}), strategy)
    chosen = found.records
    if not chosen:
        raise UserError("every record of the pool is labelled", fix="posttrain data add FILE")
    if json:
        outlook = None if found.outlook is None else gain_detail(found.outlook)
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


def _reject_misplaced_options(context: typer.Context) -> None:
    """Raise a UserError if options stand before a verb that would not see them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            verb = str(context.invoked_subcommand)
            raise UserError(f"`--{name}` stands before `{verb}`, which does not see it", fix=f"put it behind `{verb}`")


def compare(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Labelled records; those that the loop has labels of by default.")
    ] = None,
    strategies: Annotated[str, typer.Option(help="Names, with commas between them.")] = _DEFAULT_STRATEGIES,
    seeds: Annotated[
        int, typer.Option(min=1, help="Learning curves of each strategy; fewer than 6 can be sure of nothing.")
    ] = 6,
    batch: Annotated[int, typer.Option(min=1, help="Labels asked for at a time.")] = 50,
    labels: Annotated[int, typer.Option(min=1, help="Labels in the end.")] = 500,
    cold_start: Annotated[
        str, typer.Option(help="For the first labels of a strategy that goes by what a model predicts.")
    ] = AUTO,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="champion (in a workspace), minilm, a folder or a Hub id in that layout; minilm of files, and in a "
            "workspace what select.scoring.embeddings names, by default."
        ),
    ] = None,
    column: ColumnOption = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Compare the learning curves of strategies on labelled records, and recommend one."""
    from posttrain.inspect.labelled_records import labelled_in, labelled_so_far
    from posttrain.select.strategy_comparison import (
        BASELINE,
        TARGET,
        check_cold_start,
        check_strategies,
        recommendation,
    )
    from posttrain.select.strategy_comparison import compare_strategies as compared

    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if not names:
        raise UserError("no strategy is named", where="--strategies", fix="such as auto,margin")
    check_strategies(names)
    check_cold_start(cold_start)
    if column and not files:
        raise UserError("there is no file to map columns of", where="--column", fix="name the file")
    if files:
        features, answers = labelled_in(files, merge_columns(None, column), embedder or "minilm")
    else:
        with open_workspace(workspace) as (store, config):
            features, answers = labelled_so_far(store, config, embedder)
    found = compared(features, answers, names, seeds=seeds, batch=batch, most=labels, cold_start=cold_start)
    line = recommendation(found.summaries, BASELINE)
    if json:
        print_json({**asdict(found), "advice": line})
        return
    columns = ["strategy", "area", f"labels to {TARGET:.0%} of {found.full_accuracy:.3f}", "gain", "p"]
    columns += [str(count) for count in found.counts]
    rows = [[one.strategy, one.area, one.labels, one.gain, one.p_value, *one.accuracy] for one in found.summaries]
    print_table("", columns, rows)
    console.print(line, markup=False, soft_wrap=True)
