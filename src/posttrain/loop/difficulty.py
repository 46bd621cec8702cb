"""The difficulty of training records, for curricula that follow the champion's scores."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext
from posttrain.loop.history import finished_rounds
from posttrain.loop.score_files import BATCH, SCORES, read_champion_scores
from posttrain.loop.state import RoundState
from posttrain.select.scores.registry import BASE_MEASURES, uncertainty_sign
from posttrain.store.errors import DamagedArtifactError, UserError
from posttrain.train.config import TrainConfig, training_phases
from posttrain.train.data.config import DIFFICULTY_KEY, curriculum_difficulty
from posttrain.train.data.record_columns import RecordColumns

log = logging.getLogger("posttrain")


def follows_scores(config: Config) -> bool:
    """Returns True if the order of training follows scores that champions gave the records."""
    return curriculum_difficulty(training_phases(config.train)) in _computed(config)


def check_columns(context: RoundContext, *sets: str) -> None:
    """Checks that the score or column that orders or weights training exists; before any model is loaded.

    Args:
        context: The round.
        sets: Ids of the datasets that the training set is built from.

    Raises:
        UserError: if not, with the names that there are, or with the first record that has none.
    """
    config, name = context.config, curriculum_difficulty(training_phases(context.config.train))
    if config.train.weight is None and name in (None, "loss"):
        return
    tables = [RecordColumns(context.dataset(id).records) for id in sets]
    if config.train.weight is not None:
        for table in tables:
            table.weights(config.train.weight)
    if name in (None, "loss"):
        return
    columns = sorted({column for table in tables for column in table.numeric_names()})
    scores = _computed(config)
    if name in scores and name in columns:
        fix = "give the column another name in the files"
        raise UserError(f"`{name}` is a score of the loop and a column of the data", where=DIFFICULTY_KEY, fix=fix)
    if name in scores:
        return
    if name not in columns:
        there = f"there is loss, {', '.join(scores)}" + (f"; in the data {', '.join(columns)}" if columns else "")
        more = f"; name it in select.scores to have it computed ({there})" if uncertainty_sign(name) else f"; {there}"
        raise UserError(f"no score and no column of numbers `{name}`{more}", where=DIFFICULTY_KEY)
    for table in tables:
        table.numbers(str(name), DIFFICULTY_KEY)


def difficulties(context: RoundContext, records: pa.Table) -> tuple[TrainConfig, np.ndarray | None, dict[str, str]]:
    """Reads the difficulty of each training record: the score that the curriculum names, when the record was selected.

    Records without a score (those of labelled files, and those selected before a first model was trained) count as the
    easiest. If no record has a score, the training has no curriculum.

    Args:
        context: The round.
        records: RECORD table of the training set.

    Returns:
        The config to train with; float64 [records], a higher one is harder, None where no curriculum goes by a score;
        and the artifacts that were read, by role.
    """
    train = context.train_config
    name = curriculum_difficulty(training_phases(train))
    if name is None or name not in _computed(context.config):
        return train, None, {}
    score_of, inputs = _champion_scores(context, name)
    # The sign, since a high margin or probability means an easy record.
    sign = uncertainty_sign(name) or 1
    values = np.array([score_of.get(id, np.nan) for id in records["input_id"].to_pylist()]) * sign
    count = int(np.isfinite(values).sum())
    log.info("  difficulty: %d of %d records have the score `%s`", count, len(values), name)
    if not count:
        phases = [phase.model_copy(update={"curriculum": None}) for phase in train.phases]
        return train.model_copy(update={"phases": phases}), None, inputs
    # No model was unsure of a record that none has scored.
    return train, np.where(np.isfinite(values), values, -np.inf), inputs


def _computed(config: Config) -> list[str]:
    """Returns the scores that the loop computes for pool records of this task."""
    names = [*BASE_MEASURES, *(name for name in config.select.wanted_scores() if uncertainty_sign(name))]
    return [name for name in names if config.task.label_set or name != "margin"]  # free text has no second label


def _champion_scores(context: RoundContext, name: str) -> tuple[dict[str, float], dict[str, str]]:
    """Reads the score of each input when it was last selected, by input id, and lists the artifacts that were read."""
    now = context.workspace.metadata.round(context.number)
    values: dict[str, float] = {}
    inputs: dict[str, str] = {}
    for entry in [*finished_rounds(context.workspace), *([now] if now and now.status != "done" else [])]:
        batch = RoundState.from_row(entry).batch
        if batch is None:
            continue
        try:
            values |= _scores_of_round(context, name, **batch)
        except DamagedArtifactError as error:
            # A lost table costs the order of some records, and must not end the training.
            log.warning("%s; the records that round %d chose count as unscored", error, entry.number)
            continue
        inputs |= {f"{role} {entry.number}": batch[role] for role in ("scores", "selection")}
    return values, inputs


def _scores_of_round(context: RoundContext, name: str, pool: str, scores: str, selection: str) -> dict[str, float]:
    chosen = set(parquet.read_table(context.path(selection) / BATCH, columns=["id"])["id"].to_pylist())
    folder = context.path(scores)
    if name not in parquet.read_schema(folder / SCORES).names:  # it was not computed then
        return {}
    records = context.dataset(pool).records
    inputs = dict(zip(records["id"].to_pylist(), records["input_id"].to_pylist(), strict=True))
    table = read_champion_scores(folder, context.path(selection), ["id", name])
    scored = zip(table["id"].to_pylist(), table[name].to_pylist(), strict=True)
    return {inputs[id]: value for id, value in scored if id in chosen and value is not None}
