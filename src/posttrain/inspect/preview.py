"""Previews the batch of the next round without running it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.gain import estimate_batch_gain, gain_to_json
from posttrain.loop.history import finished_rounds, parent_dataset, round_config
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.score_files import BATCH, SCORES
from posttrain.loop.stages.collect import collect
from posttrain.loop.stages.evaluate import Evaluate
from posttrain.loop.stages.score import Score
from posttrain.loop.stages.select import Select, batch_size
from posttrain.loop.suites import check_suite_files
from posttrain.select.scores.registry import uncertainty_sign
from posttrain.select.stopping import GainEstimate
from posttrain.select.strategy import needs_trained_champion
from posttrain.store.errors import UserError
from posttrain.store.text_files import finite_json
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class Preview:
    """A batch and its expected gain.

    Attributes:
        records: One entry each, best first: ``id, reason, why, rank, inclusion, uncertainty, predicted, input``, and
            ``scores``, numbers by the score's name; null where the record was not scored.
        strategy: Name of the strategy that selected them.
        gain: Expected gain; None if an earlier round cannot be read.
        remaining_labels: Labels that ``label.budget`` allows in a round, if fewer than the batch has.
    """

    records: list[dict[str, Any]]
    strategy: str
    gain: GainEstimate | None
    remaining_labels: int | None

    def to_json(self) -> dict[str, Any]:
        """Converts to the values of ``select --json``: ``records``, ``strategy``, ``outlook`` and ``labels_left``."""
        outlook = None if self.gain is None else gain_to_json(self.gain)
        values = {"records": self.records, "strategy": self.strategy, "outlook": outlook}
        return values | {"labels_left": self.remaining_labels}


def preview_selection(
    workspace: Workspace, config: Config, strategy: str | None = None, n: int | None = None
) -> Preview:
    """Selects the batch that the next round would label with this config.

    Args:
        workspace: The workspace.
        config: Its config.
        strategy: Name of a strategy that replaces the config's; None for that one.
        n: Number of records; None for ``label.per_round``.

    Raises:
        UserError: there is no champion yet to score the pool, its scores say nothing to the strategy, or every record
            is labelled.
    """
    rounds, config = finished_rounds(workspace), round_config(workspace, config)
    if n is not None:
        config = config.model_copy(update={"label": config.label.model_copy(update={"per_round": n})})
    champion = ModelRegistry(workspace).champion
    if champion is None or not rounds:
        raise UserError("there is no champion yet to score the pool with", fix="posttrain run --rounds 0")
    cold = champion.model_id == rounds[0].candidate
    if strategy is not None:
        config = _with_strategy(config, strategy, cold)
    check_suite_files(config, workspace.root)
    with workspace.work():
        context = RoundContext(workspace, config, len(rounds), in_round=False)
        collected = collect(context)
        evaluation = context.run(Evaluate(champion.model_id, collected.test.id))
        train = parent_dataset(workspace)
        pool, test = collected.pool.id, collected.test.id
        scores = context.run(Score.from_context(context, champion.model_id, pool, train, test, evaluation.id, cold))
        # Without the budget's limit, which may be used up: the preview shows the whole batch and what remains.
        n = config.label.per_round
        selection = context.run(Select(champion.model_id, pool, scores, evaluation.id, n, cold))
        expected = estimate_batch_gain(context, champion.model_id, scores, selection.meta["records"])
        batch: list[dict[str, Any]] = parquet.read_table(context.path(selection.id) / BATCH).to_pylist()
        records = {record["id"]: record for record in context.dataset(collected.pool.id).records.to_pylist()}
        numbers = _scores_by_record(parquet.read_table(context.path(scores.id) / SCORES), {row["id"] for row in batch})
    if not batch:
        raise UserError("every record of the pool is labelled", fix="posttrain data add FILE")
    for row in batch:
        record = records[row["id"]]
        row["scores"] = numbers.get(row["id"], {})
        row["input"] = record["text"] or " / ".join(part["content"] for part in record["prompt"])
    remaining = batch_size(context)
    return Preview(batch, selection.meta["strategy"], expected, remaining if remaining < len(batch) else None)


def _scores_by_record(scores: pa.Table, ids: Collection[str]) -> dict[str, dict[str, float | None]]:
    """Returns the scores of records by name."""
    names = [name for name in scores.column_names if uncertainty_sign(name)]
    return {
        row["id"]: finite_json({name: row[name] for name in names})
        for row in scores.select(["id", *names]).to_pylist()
        if row["id"] in ids
    }


def _with_strategy(config: Config, strategy: str, cold: bool) -> Config:
    """Replaces the config's strategy."""
    select = config.select
    if strategy != select.strategy:
        # Options belong to the strategy that the config names, and another one would reject them.
        select = select.read({**select.model_dump(), "strategy": strategy, "options": {}}, "--strategy")
        select.check(bool(config.task.label_set), "--strategy")
    if needs_trained_champion(strategy, cold):
        what = f"strategy `{strategy}` uses the champion's uncertainty, and none has been trained yet"
        raise UserError(what, where="--strategy", fix="use auto, facility_location, typiclust, diverse or random")
    return config.model_copy(update={"select": select})
