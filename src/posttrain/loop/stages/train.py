"""Train: a candidate from the base or the champion and the training set."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.data.versions.named_versions import require_no_overlap
from posttrain.loop.config import Config
from posttrain.loop.context import RoundContext, task_key
from posttrain.loop.history import finished_rounds
from posttrain.loop.score_files import BATCH, SCORES, read_champion_scores
from posttrain.loop.stages.collect import RoundData
from posttrain.loop.stages.fetch import fetch_teacher
from posttrain.loop.suites import measured_on
from posttrain.select.scores.registry import BASE_MEASURES, UNCERTAINTY_SIGN
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import DamagedArtifactError, UserError
from posttrain.train.config import OPERATIONAL_SECTIONS, TrainConfig, training_phases
from posttrain.train.data.config import CurriculumConfig, curriculum_difficulty
from posttrain.train.data.record_columns import numeric_column, numeric_meta_columns, weight_column
from posttrain.train.monitor.sinks import open_sinks
from posttrain.train.stage import VERSION, train

log = logging.getLogger("posttrain")

_WHERE = "train.curriculum.difficulty"

_CHOSEN = ("asked", "scores", "selection")


def train_candidate(turn: RoundContext, base: str, champion: str, dataset: str, test: Artifact) -> Artifact:
    """The round's candidate.

    Raises:
        UserError: the training set gives away what is in the test set or another suite.
    """
    source = base if turn.config.train.start == "base" else champion
    teacher = fetch_teacher(turn)
    records = turn.dataset(dataset).records
    # Not in the work: what is measured on may have changed since a model was trained on these records.
    measured = measured_on(turn.config, turn.dataset(test.id).records, turn.workspace.root)
    require_no_overlap(records, measured, f"the training set of round {turn.number}", turn.config.data.decontamination)

    config, hard, scored = difficulties(turn, records)

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        # A run of its own at each tracker, whose name stays when a killed round goes on.
        run = f"{turn.workspace.root.resolve().name}-round-{turn.number}-{scratch.name[:8]}"
        # Beside the artifact, which is the same whenever it is made: speed and memory are not. The report reads it.
        metrics = turn.workspace.home / "metrics" / f"{scratch.name}.jsonl"
        sinks = open_sinks(turn.config.train.sinks, metrics, run=run)
        try:
            return train(
                turn.path(source),
                records,
                config if teacher is None else config.with_teacher(turn.path(teacher.id)),
                turn.config.task,
                seed=turn.seed("train"),
                out=out,
                scratch=scratch,
                sink=sinks,
                difficulties=hard,
            )
        finally:
            sinks.close()

    # A teacher is an input: which one it is counts, and not where it lies.
    settings = turn.config.train.with_teacher(None).model_dump(mode="json", exclude={"start", *OPERATIONAL_SECTIONS})
    inputs = {"source": source, "dataset": dataset} | ({"teacher": teacher.id} if teacher else {}) | scored
    return turn.stage("train", "model", inputs, {"train": settings, **task_key(turn.config)}, work, version=VERSION)


def goes_by_scores(config: Config) -> bool:
    """Whether training's order hangs on what the champion of the day said of the records."""
    return curriculum_difficulty(training_phases(config.train)) in _computed(config)


def check_columns(turn: RoundContext, collected: RoundData) -> None:
    """Find out before any model is loaded whether what training goes by is there: a score, or a column of the data.

    Args:
        collected: what the training set will be taken from.

    Raises:
        UserError: if not, with the names that there are, or with the first record that has none.
    """
    config, name = turn.config, curriculum_difficulty(training_phases(turn.config.train))
    if config.train.weight is None and name in (None, "loss"):
        return
    records = [turn.dataset(one.id).records for one in (collected.pool, collected.labelled)]
    if config.train.weight is not None:
        for table in records:
            weight_column(table, config.train.weight)
    if name in (None, "loss"):
        return
    found = sorted({column for table in records for column in numeric_meta_columns(table)})
    scores = _computed(config)
    if name in scores and name in found:
        fix = "give the column another name in the files"
        raise UserError(f"`{name}` is a score of the loop and a column of the data", where=_WHERE, fix=fix)
    if name in scores:
        return
    if name not in found:
        there = f"there is loss, {', '.join(scores)}" + (f"; in the data {', '.join(found)}" if found else "")
        more = f"; name it in select.scores to have it computed ({there})" if name in UNCERTAINTY_SIGN else f"; {there}"
        raise UserError(f"no score and no column of numbers `{name}`{more}", where=_WHERE)
    for table in records:
        numeric_column(table, str(name), _WHERE)


def difficulties(turn: RoundContext, records: pa.Table) -> tuple[TrainConfig, np.ndarray | None, dict[str, str]]:
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
    name = curriculum_difficulty(training_phases(train))
    if name is None or name not in _computed(turn.config):
        return train, None, {}
    said, inputs = _said(turn, name)
    values = np.array([said.get(id, np.nan) for id in records["input_id"].to_pylist()]) * UNCERTAINTY_SIGN[name]
    known = int(np.isfinite(values).sum())
    log.info("  difficulty: `%s` is known of %d of %d records", name, known, len(values))
    if not known:
        stages = [stage.model_copy(update={"curriculum": CurriculumConfig()}) for stage in train.stages]
        return train.model_copy(update={"curriculum": CurriculumConfig(), "stages": stages}), None, inputs
    return train, np.where(np.isfinite(values), values, -np.inf), inputs


def _computed(config: Config) -> list[str]:
    """The scores that the loop computes of pool records of this task."""
    names = [name for name in UNCERTAINTY_SIGN if name in BASE_MEASURES or name in config.select.wanted_scores()]
    return [name for name in names if config.task.label_set or name != "margin"]  # free text has no second label


def _said(turn: RoundContext, name: str) -> tuple[dict[str, float], dict[str, str]]:
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
        except DamagedArtifactError as error:
            log.warning("%s; what round %d chose counts as never scored", error, entry.number)
            continue
        inputs |= {f"scores {entry.number}": scores, f"selection {entry.number}": selection}
    return values, inputs


def _of_round(turn: RoundContext, name: str, asked: str, scores: str, selection: str) -> dict[str, float]:
    chosen = set(parquet.read_table(turn.path(selection) / BATCH, columns=["id"])["id"].to_pylist())
    folder = turn.path(scores)
    if name not in parquet.read_schema(folder / SCORES).names:  # it was not computed then
        return {}
    pool = turn.dataset(asked).records
    inputs = dict(zip(pool["id"].to_pylist(), pool["input_id"].to_pylist(), strict=True))
    table = read_champion_scores(folder, turn.path(selection), ["id", name])
    said = zip(table["id"].to_pylist(), table[name].to_pylist(), strict=True)
    return {inputs[id]: value for id, value in said if id in chosen and value is not None}
