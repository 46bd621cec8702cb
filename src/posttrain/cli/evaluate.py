"""``posttrain eval``: measures a model on the config's suites."""

from typing import Annotated

import typer

from posttrain.cli.output import JsonOption, print_json, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.store.errors import UserError


def evaluate(
    workspace: WorkspaceOption = CURRENT_FOLDER,
    model: Annotated[str | None, typer.Option(help="A model's id; the champion by default.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Measure on all test records instead of the sample.")] = False,
    json: JsonOption = False,
) -> None:
    """Measure a model on the suites of the config."""
    from posttrain.loop.context import RoundContext
    from posttrain.loop.model_registry import ModelRegistry
    from posttrain.loop.stages.collect import collect
    from posttrain.loop.stages.evaluate import Evaluate
    from posttrain.loop.suites import check_suite_files

    with open_workspace(workspace, write=True) as (store, config):
        champion = ModelRegistry(store).champion
        if model is None and champion is None:
            raise UserError("there is no champion yet", fix="posttrain run, or name a --model")
        id = store.metadata.resolve(model) if model else champion.model_id if champion else ""
        row = store.metadata.artifact(id)
        if row is None or row.kind != "model":
            raise UserError(f"`{model}` is no model of this workspace", where="--model", fix="posttrain models list")
        # Before the evaluation is looked up: a finished one says nothing of files that were damaged since.
        store.artifacts.path(id)
        check_suite_files(config, workspace)
        with store.lock():
            # Outside of rounds: a measurement by hand counts as no round's time, but the next round finds its result.
            context = RoundContext(store, config, len(store.metadata.rounds()), in_round=False)
            evaluation = context.run(Evaluate(id, collect(context).test.id, full=full))
    metrics = evaluation.meta["metrics"]
    if json:
        print_json({"model": id, "evaluation": evaluation.id, "metrics": metrics})
    else:
        print_table(f"{id} ({evaluation.id})", ["metric", "value"], [list(entry) for entry in metrics.items()])
