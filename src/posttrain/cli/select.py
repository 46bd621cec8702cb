"""``posttrain select``: a batch of records worth a label, with the reasons; strategies compared."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.data.stored import ColumnOption, columns_with
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, opened, print_json, print_table
from posttrain.store.errors import UserError

app = typer.Typer(name="select")

_COMPARED = "random,margin,uncertain_diverse,typiclust,facility_location,badge"


@app.callback(invoke_without_command=True)
def select(
    context: typer.Context,
    workspace: WorkspaceOption = HERE,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Records wanted; label.per_round by default.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Strategy; select.strategy by default.")] = None,
    json: JsonOption = False,
) -> None:
    """Choose records of the pool that are worth a label, by the present champion; labels nothing."""
    if context.invoked_subcommand is not None:
        return
    from posttrain.loop.preview import preview_selection

    with opened(workspace, write=True) as (store, config):
        label = config.label.model_copy(update={"per_round": n} if n else {})
        chosen = preview_selection(store, config.model_copy(update={"label": label}), strategy)
    if not chosen:
        raise UserError("every record of the pool is labelled", fix="posttrain data add FILE")
    if json:
        print_json(chosen)
        return
    rows = [[r["rank"], r["reason"], r["uncertainty"], r["predicted"], r["id"], r["input"][:70]] for r in chosen]
    print_table("", ["rank", "reason", "entropy", "predicted", "record", "input"], rows)
    counts = Counter(record["reason"] for record in chosen)
    console.print(", ".join(f"{reason}: {count}" for reason, count in counts.items()), markup=False)


@app.command()
def compare(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Labelled records; those that the loop has labels of by default.")
    ] = None,
    strategies: Annotated[str, typer.Option(help="Names, with commas between them.")] = _COMPARED,
    seeds: Annotated[int, typer.Option(min=1, help="Learning curves of each strategy.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Labels asked for at a time.")] = 50,
    labels: Annotated[int, typer.Option(min=1, help="Labels in the end.")] = 500,
    cold_start: Annotated[
        str, typer.Option(help="For the first labels of a strategy that goes by what a model predicts.")
    ] = "facility_location",
    embedder: Annotated[
        str, typer.Option(help="For files: minilm, a folder or a name in sentence-transformers' layout.")
    ] = "minilm",
    column: ColumnOption = None,
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """Learning curves of strategies on labelled records, and which of them to use."""
    from posttrain.loop.strategy_comparison import labelled_in, labelled_so_far
    from posttrain.select.compare.compare import BASELINE, TARGET, check_names
    from posttrain.select.compare.compare import compare as compared
    from posttrain.select.compare.summary import advice

    names = [name.strip() for name in strategies.split(",") if name.strip()]
    check_names([*names, cold_start])
    if files:
        features, answers = labelled_in(files, columns_with(None, column), embedder)
    else:
        with opened(workspace) as (store, config):
            features, answers = labelled_so_far(store, config)
    found = compared(features, answers, names, seeds=seeds, batch=batch, most=labels, cold_start=cold_start)
    line = advice(found.summaries, BASELINE)
    if json:
        print_json({**asdict(found), "advice": line})
        return
    columns = ["strategy", "area", f"labels to {TARGET:.0%} of {found.full_accuracy:.3f}", "gain", "p"]
    columns += [str(count) for count in found.counts]
    rows = [[one.strategy, one.area, one.labels, one.gain, one.p_value, *one.accuracy] for one in found.summaries]
    print_table("", columns, rows)
    console.print(line, markup=False)


def add_to(parent: typer.Typer) -> None:
    """Register the group."""
    parent.add_typer(app)
