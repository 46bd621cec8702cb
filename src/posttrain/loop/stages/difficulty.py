"""What a training goes by besides the records' words: how hard they were for the champions, and columns of the data."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.loop.config import Config
from posttrain.loop.history import finished_rounds
from posttrain.loop.stages.choose import BATCH, SCORES, said_by_champion
from posttrain.loop.stages.collect import Collected
from posttrain.loop.turn import Turn
from posttrain.select.scores.names import BASE, DOUBT
from posttrain.store.errors import DamagedArtifact, UserError
from posttrain.train.columns import columns_beside, numbers, weights
from posttrain.train.config import TrainConfig
from posttrain.train.curriculum import CurriculumConfig
from posttrain.train.order import difficulty_of, stages_of

log = logging.getLogger("posttrain")

_WHERE = "train.curriculum.difficulty"
_CHOSEN = ("asked", "scores", "selection")


def goes_by_scores(config: Config) -> bool:
    """Whether training's order hangs on what the champion of the day said of the records."""
    return difficulty_of(stages_of(config.train)) in _computed(config)


def check_columns(turn: Turn, collected: Collected) -> None:
    """Find out before any model is loaded whether what training goes by is there: a score, or a column of the data.

    Args:
        collected: what the training set will be taken from.

    Raises:
        UserError: if not, with the names that there are, or with the first record that has none.
    """
    config, name = turn.config, difficulty_of(stages_of(turn.config.train))
    if config.train.weight is None and name in (None, "loss"):
        return
    records = [turn.dataset(one.id).records for one in (collected.pool, collected.labelled)]
    if config.train.weight is not None:
        for table in records:
            weights(table, config.train.weight)
    if name in (None, "loss"):
        return
    found = sorted({column for table in records for column in columns_beside(table)})
    scores = _computed(config)
    if name in scores and name in found:
        fix = "give the column another name in the files"
        raise UserError(f"`{name}` is a score of the loop and a column of the data", where=_WHERE, fix=fix)
    if name in scores:
        return
    if name not in found:
        there = f"there is loss, {', '.join(scores)}" + (f"; in the data {', '.join(found)}" if found else "")
        more = f"; name it in select.scores to have it computed ({there})" if name in DOUBT else f"; {there}"
        raise UserError(f"no score and no column of numbers `{name}`{more}", where=_WHERE)
    for table in records:
        numbers(table, str(name), _WHERE)


def difficulties(turn: Turn, records: pa.Table) -> tuple[TrainConfig, np.ndarray | None, dict[str, str]]:
    """How hard the records are by the score that the curriculum names: what the champion of the day said of each.

    Records that no champion had an opinion of (those of labelled files, and those chosen before a first model was
    trained) count as the easiest: no model was found to be unsure of them. Where that is all of them, there is nothing
    to go by, and the training has no curriculum.

    Args:
        turn: the round.
        records: the training set.

    Returns:
        The config to train with; float64 [records], a higher one is harder, None where no curriculum goes by a score;
        and the artifacts that were read, by role.
    """
    train = turn.config.train
    name = difficulty_of(stages_of(train))
    if name is None or name not in _computed(turn.config):
        return train, None, {}
    said, inputs = _said(turn, name)
    values = np.array([said.get(id, np.nan) for id in records["input_id"].to_pylist()]) * DOUBT[name]
    known = int(np.isfinite(values).sum())
    log.info("  difficulty: `%s` is known of %d of %d records", name, known, len(values))
    if not known:
        stages = [stage.model_copy(update={"curriculum": CurriculumConfig()}) for stage in train.stages]
        return train.model_copy(update={"curriculum": CurriculumConfig(), "stages": stages}), None, inputs
    return train, np.where(np.isfinite(values), values, -np.inf), inputs


def _computed(config: Config) -> list[str]:
    """The scores that the loop computes of pool records of this task."""
    names = [name for name in DOUBT if name in BASE or name in config.select.wanted_scores()]
    return [name for name in names if config.task.label_set or name != "margin"]  # free text has no second label


def _said(turn: Turn, name: str) -> tuple[dict[str, float], dict[str, str]]:
    """By input id what the champion said when a record was chosen, the last time; and what that was read from."""
    now = turn.workspace.metadata.round(turn.number)
    values: dict[str, float] = {}
    inputs: dict[str, str] = {}
    for entry in [*finished_rounds(turn.workspace), *([now] if now and now.status != "done" else [])]:
        if not all(role in entry.detail for role in _CHOSEN):
            continue
        asked, scores, selection = (str(entry.detail[role]) for role in _CHOSEN)
        try:
            values |= _of_round(turn, name, asked, scores, selection)
        except DamagedArtifact as error:
            log.warning("%s; what round %d chose counts as never scored", error, entry.number)
            continue
        inputs |= {f"scores {entry.number}": scores, f"selection {entry.number}": selection}
    return values, inputs


def _of_round(turn: Turn, name: str, asked: str, scores: str, selection: str) -> dict[str, float]:
    chosen = set(parquet.read_table(turn.path(selection) / BATCH, columns=["id"])["id"].to_pylist())
    folder = turn.path(scores)
    if name not in parquet.read_schema(folder / SCORES).names:  # it was not computed then
        return {}
    pool = turn.dataset(asked).records
    inputs = dict(zip(pool["id"].to_pylist(), pool["input_id"].to_pylist(), strict=True))
    table = said_by_champion(folder, turn.path(selection), ["id", name])
    said = zip(table["id"].to_pylist(), table[name].to_pylist(), strict=True)
    return {inputs[id]: value for id, value in said if id in chosen and value is not None}
