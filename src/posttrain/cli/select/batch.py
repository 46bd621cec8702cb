"""``posttrain select`` and ``posttrain select compare``: choose a batch to label, and compare strategies."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
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
    n: Annotated[int | None, typer.Option("--n", min=1, help="Batch size; label.per_round by default.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Strategy; select.strategy by default.")] = None,
    json: JsonOption = False,
) -> None:
    """Choose pool records worth labelling, scored by the champion; labels nothing."""
    # `select` is a verb and a group: typer calls this function before every verb of the group too.
    if context.invoked_subcommand is not None:
        _reject_misplaced_options(context)
        return
    from posttrain.inspect.preview import preview_selection
    from posttrain.loop.stages.select import gain_detail

    with open_workspace(workspace, write=True) as (store, config):
        label = config.label.model_copy(update={"per_round": n} if n else {})
        preview = preview_selection(store, config.model_copy(update={"label": label}), strategy)
    chosen = preview.records
    if not chosen:
        raise UserError("every record of the pool is labelled", fix="posttrain data add FILE")
    if json:
        outlook = None if preview.outlook is None else gain_detail(preview.outlook)
        print_json({"records": chosen, "strategy": preview.strategy, "outlook": outlook, "labels_left": preview.left})
        return
    rows = [[r["rank"], r["reason"], r["predicted"], r["id"], r["input"][:70], r["why"]] for r in chosen]
    print_table("", ["rank", "reason", "predicted", "record", "input", "why"], rows)
    counts = Counter(record["reason"] for record in chosen)
    parts = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
    print_line(f"{parts}; by {preview.strategy}")
    if preview.left is not None:
        print_line(f"label.budget leaves {preview.left} of them")
    if preview.outlook:
        print_line(preview.outlook.sentence)
        if preview.outlook.why:
            print_line(f"labelling more has stopped to pay: {preview.outlook.why}")


def _reject_misplaced_options(context: typer.Context) -> None:
    """Raises a UserError if options stand before a verb that would not see them."""
    for name in context.params:
        # Typer would drop it in silence: `select --n 5 value` must not run with another number.
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            verb = str(context.invoked_subcommand)
            raise UserError(f"`--{name}` stands before `{verb}`, which does not see it", fix=f"put it behind `{verb}`")


def compare(
    files: Annotated[list[Path] | None, typer.Argument(help="Labelled records; those of the loop by default.")] = None,
    strategies: Annotated[str, typer.Option(help="Comma-separated names.")] = _DEFAULT_STRATEGIES,
    seeds: Annotated[
        int, typer.Option(min=1, help="Learning curves per strategy; fewer than 6 cannot be significant.")
    ] = 6,
    batch: Annotated[int, typer.Option(min=1, help="Labels a batch.")] = 50,
    labels: Annotated[int, typer.Option(min=1, help="Labels at the end of a curve.")] = 500,
    cold_start: Annotated[
        str, typer.Option(help="Strategy for the first labels, where the strategy itself needs a model's predictions.")
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
    # Before the embedding, which may take minutes.
    check_strategies(names)
    check_cold_start(cold_start)
    if column and not files:
        raise UserError("there is no file to map columns of", where="--column", fix="name the file")
    if files:
        features, answers = labelled_in(files, merge_columns(None, column), embedder or "minilm")
    else:
        with open_workspace(workspace) as (store, config):
            features, answers = labelled_so_far(store, config, embedder)
    result = compared(features, answers, names, seeds=seeds, batch=batch, most=labels, cold_start=cold_start)
    line = recommendation(result.summaries, BASELINE)
    if json:
        print_json({**asdict(result), "advice": line})
        return
    columns = ["strategy", "area", f"labels to {TARGET:.0%} of {result.full_accuracy:.3f}", "gain", "p"]
    columns += [str(count) for count in result.counts]
    rows = [
        [summary.strategy, summary.area, summary.labels, summary.gain, summary.p_value, *summary.accuracy]
        for summary in result.summaries
    ]
    print_table("", columns, rows)
    print_line(line)
