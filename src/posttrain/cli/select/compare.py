"""``posttrain select compare``: strategies side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.data.stored import ColumnOption, columns_with
from posttrain.cli.shared import HERE, JsonOption, WorkspaceOption, console, opened, print_json, print_table
from posttrain.select.auto import AUTO
from posttrain.store.errors import UserError

_COMPARED = "auto,random,margin,uncertain_diverse,typiclust,facility_location,badge"


def compare(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Labelled records; those that the loop has labels of by default.")
    ] = None,
    strategies: Annotated[str, typer.Option(help="Names, with commas between them.")] = _COMPARED,
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
    workspace: WorkspaceOption = HERE,
    json: JsonOption = False,
) -> None:
    """Learning curves of strategies on labelled records, and which of them to use."""
    from posttrain.loop.strategy_comparison import labelled_in, labelled_so_far
    from posttrain.select.compare.compare import BASELINE, TARGET, check_cold_start, check_names
    from posttrain.select.compare.compare import compare as compared
    from posttrain.select.compare.summary import advice

    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if not names:
        raise UserError("no strategy is named", where="--strategies", fix="such as auto,margin")
    check_names(names)
    check_cold_start(cold_start)
    if column and not files:
        raise UserError("there is no file to map columns of", where="--column", fix="name the file")
    if files:
        features, answers = labelled_in(files, columns_with(None, column), embedder or "minilm")
    else:
        with opened(workspace) as (store, config):
            features, answers = labelled_so_far(store, config, embedder)
    found = compared(features, answers, names, seeds=seeds, batch=batch, most=labels, cold_start=cold_start)
    line = advice(found.summaries, BASELINE)
    if json:
        print_json({**asdict(found), "advice": line})
        return
    columns = ["strategy", "area", f"labels to {TARGET:.0%} of {found.full_accuracy:.3f}", "gain", "p"]
    columns += [str(count) for count in found.counts]
    rows = [[one.strategy, one.area, one.labels, one.gain, one.p_value, *one.accuracy] for one in found.summaries]
    print_table("", columns, rows)
    console.print(line, markup=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(compare)
