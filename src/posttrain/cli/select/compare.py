"""``posttrain select compare``: compare the learning curves of strategies."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, ColumnOption, WorkspaceOption, merge_columns, open_workspace
from posttrain.store.errors import UserError

_DEFAULT_STRATEGIES = "auto,random,margin,uncertain_diverse,typiclust,facility_location,badge"


def compare(
    files: Annotated[list[Path] | None, typer.Argument(help="Labelled records; those of the loop by default.")] = None,
    strategies: Annotated[str, typer.Option(help="Strategies, separated by commas.")] = _DEFAULT_STRATEGIES,
    seeds: Annotated[
        int, typer.Option(min=1, help="Learning curves per strategy; fewer than 6 cannot be significant.")
    ] = 6,
    batch: Annotated[int, typer.Option(min=1, help="Number of labels per batch.")] = 50,
    labels: Annotated[int, typer.Option(min=1, help="Number of labels at the end of a curve.")] = 500,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="Embedding model: champion (in a workspace), minilm, a folder or a Hub id in minilm's layout; "
            "by default minilm for files, else select.embeddings."
        ),
    ] = None,
    column: ColumnOption = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Compare the learning curves of strategies on labelled records, and recommend one."""
    from posttrain.inspect.labelled_records import embed_labelled, embed_labelled_files
    from posttrain.select.strategy_comparison import BASELINE, TARGET, check_strategies, recommendation
    from posttrain.select.strategy_comparison import compare_strategies as compared

    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if not names:
        raise UserError("no strategy is named", where="--strategies", fix="such as auto,margin")
    # Before the embedding, which may take minutes.
    check_strategies(names)
    if column and not files:
        raise UserError("there is no file to map columns of", where="--column", fix="name the file")
    if files:
        features, answers = embed_labelled_files(files, merge_columns(None, column), embedder or "minilm")
    else:
        with open_workspace(workspace) as (store, config):
            features, answers = embed_labelled(store, config, embedder)
    result = compared(features, answers, names, seeds=seeds, batch=batch, most=labels)
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
