"""What the next round would select, without turning it."""

from typing import Any

import pyarrow.parquet as parquet

from posttrain.loop.check import check_suites
from posttrain.loop.config import Config
from posttrain.loop.history import carried_dataset, finished_rounds
from posttrain.loop.registry import Registry
from posttrain.loop.stages.choose import BATCH, score, select
from posttrain.loop.stages.collect import collect
from posttrain.loop.stages.evaluation import evaluate
from posttrain.loop.turn import Turn
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace


def preview_selection(workspace: Workspace, config: Config, strategy: str | None = None) -> list[dict[str, Any]]:
    """The batch that the next round would label with this config.

    Args:
        workspace: the workspace.
        config: its config.
        strategy: chooses in place of the config's.

    Returns:
        One entry a record, best first: ``id, reason, rank, uncertainty, predicted, input``.

    Raises:
        UserError: if there is no champion yet to score the pool with, or it says nothing to the strategy.
    """
    rounds = finished_rounds(workspace)
    champion = Registry(workspace).champion
    if champion is None or not rounds:
        raise UserError("there is no champion yet to score the pool with", fix="posttrain run --rounds 0")
    cold = champion.model_id == rounds[0].candidate
    if strategy is not None:
        config = _with_strategy(config, strategy, cold)
    check_suites(config, workspace.root)
    with workspace.lock():
        turn = Turn(workspace, config, len(rounds), in_round=False)
        collected = collect(turn)
        evaluation = evaluate(turn, champion.model_id, collected.test)
        train = carried_dataset(workspace)
        scores = score(turn, champion.model_id, collected.pool, train, collected.test, evaluation.id, cold)
        selection = select(turn, scores, evaluation.id, cold)
        batch: list[dict[str, Any]] = parquet.read_table(turn.path(selection.id) / BATCH).to_pylist()
        records = {record["id"]: record for record in turn.dataset(collected.pool.id).records.to_pylist()}
    for row in batch:
        record = records[row["id"]]
        row["input"] = record["text"] or " / ".join(part["content"] for part in record["prompt"])
    return batch


def _with_strategy(config: Config, strategy: str, cold: bool) -> Config:
    changes = {"cold_start": strategy} if cold else {"strategy": strategy, "options": {}}
    if strategy == config.select.strategy:
        changes.pop("options", None)
    section = config.select.read({**config.select.model_dump(), **changes}, "--strategy")
    section.check(bool(config.task.label_set), "--strategy")
    return config.model_copy(update={"select": section})
