"""Evaluates a workspace's model, or an ensemble by its file, on the suites of the config, outside of rounds."""

from pathlib import Path
from typing import Any

from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.ensembles import check_not_measured, fit_ensemble
from posttrain.loop.model_registry import ModelRegistry, find_model
from posttrain.loop.stages.collect import collect
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.suites import check_suite_files
from posttrain.models.ensembles.config import FILES, EnsembleConfig
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace


def evaluate_model(
    workspace: Workspace, config: Config, model: str | None = None, full: bool = False
) -> dict[str, Any]:
    """Evaluates a model, or finds its finished evaluation.

    Args:
        workspace: The workspace.
        config: Its config.
        model: ``champion``, ``round 2``, an id or the beginning of one, or an ensemble's file (``.yaml``), relative to
            the current folder; the champion by default.
        full: True to measure on all test records in place of the sample.

    Returns:
        ``model`` and ``evaluation`` (ids), ``metrics`` by name, and of an ensemble ``ensemble``: by suite what
        `posttrain.models.ensembles.report.describe_ensemble` returns.

    Raises:
        UserError: there is no such model, or the ensemble's file is wrong.
        DamagedArtifactError: the model is damaged.
    """
    file = Path(model) if model is not None and model.endswith(FILES) else None
    if file is not None:
        # Before any work: a mistake in the file shows at once.
        EnsembleConfig.load(file)
        id = ""
    elif model is not None:
        try:
            id = find_model(workspace, model)
        except UserError as error:
            raise UserError(error.what, where="--model", fix=error.fix) from None
    elif (champion := ModelRegistry(workspace).champion) is not None:
        id = champion.model_id
    else:
        raise UserError("there is no champion yet", fix="posttrain run, or name a --model")
    if id:
        # Before the evaluation is looked up: a finished one says nothing of files that were damaged since.
        workspace.artifacts.path(id)
    check_suite_files(config, workspace.root)
    with workspace.work():
        # Outside of rounds: a measurement by hand counts as no round's time, but the next round finds its result.
        context = RoundContext(workspace, config, len(workspace.metadata.rounds()), in_round=False)
        test = collect(context).test.id
        if file is not None:
            check_not_measured(context, file, test)
            id = fit_ensemble(context, file, str(file))
        evaluation = context.run(Evaluate(id, test, full=full))
    result = {"model": id, "evaluation": evaluation.id, "metrics": evaluation.meta["metrics"]}
    suites = read_evaluation(workspace.artifacts.path(evaluation.id)) if file is not None else {}
    reports = {name: suite.ensemble for name, suite in suites.items() if suite.ensemble}
    return {**result, **({"ensemble": reports} if reports else {})}
