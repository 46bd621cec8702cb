"""Tune: searches the settings of the round's training, where the rule of ``tune.when`` asks for it."""

import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import yaml

from posttrain.data.versions.leaks import require_no_overlap
from posttrain.loop.context import RoundContext
from posttrain.loop.history import adjusted_config, finished_states
from posttrain.loop.record import LoopRecord, RoundRecord, StageReport
from posttrain.loop.stage import Stage
from posttrain.loop.stages.decide import drift_of
from posttrain.loop.stages.train import Train
from posttrain.loop.state import RoundState
from posttrain.loop.suites import measured_on
from posttrain.loop.tuning import (
    STAGE,
    Tuning,
    last_tuned,
    round_sentence,
    tuned_keys,
    tuned_value,
    tuning_of,
    tuning_rule,
)
from posttrain.report.section import Section, Text
from posttrain.store.errors import DamagedArtifactError, UserError, WorkError
from posttrain.store.files import make_folder
from posttrain.store.message import Message
from posttrain.store.section import MAX_INTEGER
from posttrain.train.data.tokenise import content_digest
from posttrain.train.monitor.config import SinksConfig
from posttrain.tune.space import Space
from posttrain.tune.trainings.config import LEAST_HELD_OUT, TuneConfig
from posttrain.tune.trainings.held_out import overlapping
from posttrain.tune.trainings.settings import find_point

if TYPE_CHECKING:
    from posttrain.loop.config import Config
    from posttrain.tune.trainings.training_trial import TrainingTrial
    from posttrain.tune.transfer.past import PastStudy
    from posttrain.tune.trial import Trial

log = logging.getLogger("posttrain")

_EARLIER = 8  # searches, the last ones, that a new one may start from

_DRAWN = 3  # searches that the report shows, the latest

BEST_FILE = "best.yaml"


@dataclass(frozen=True)
class Tune(Stage):
    """Searches the settings of a training on a part of the training set.

    Args:
        training: The round's training, with the config as it is without tuned settings.
        base: That config.
        rows: bool [records], the training's records to train on.
        held_out: RECORD table of the records to measure on.
        values: The values that the rule was decided by, as text.
        labels: Labels of the training set.
        earlier: Ids of the artifacts of earlier searches, by their rounds. ``helpers`` are the last one's settings.
    """

    training: Train
    base: "Config"
    rows: npt.NDArray[np.bool_]
    held_out: pa.Table
    values: str
    labels: int
    earlier: Mapping[int, str]
    helpers: Mapping[str, Any]
    name = STAGE
    title = Message("tune")
    kind = "tuning"

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Searches, if the rule holds; the settings hold from this round's training on."""
        state, tune = context.state, context.config.tune
        # Those of an earlier attempt go, as config or data have changed since.
        state = state.without(cls.name)
        if tune is None or state.dataset is None:
            return state
        rule, values = tuning_rule(tune), _rule_values(context)
        named = {name: values.get(name, math.nan) for name in rule.names}
        if not rule.holds(named):
            return state
        stage = cls._prepare(context, tune, rule.format_values(named))
        if (count := stage.held_out.num_rows) < LEAST_HELD_OUT or not stage.rows.any():
            needed = {"count": count, "records": len(stage.rows), "least": LEAST_HELD_OUT}
            log.warning("  %s", _not_tuned(needed))
            return state.with_result(cls.name, {"too_few": needed})
        artifact = context.run(stage)
        tuning = Tuning(**artifact.meta)
        for sentence in tuning.sentences:
            log.info("  %s", sentence)
        return state.with_output(cls.name, artifact.id).with_result(cls.name, tuning.as_dict())

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports what the search decided, or why there was none although the rule asked for it."""
        tuning, result = tuning_of(record.state), record.state.results.get(cls.name) or {}
        if tuning is None and "too_few" in result:
            return StageReport({"tuning": None}, [_not_tuned(result["too_few"])])
        return StageReport({"tuning": tuning and tuning.as_dict()}, tuning.sentences if tuning else ())

    @classmethod
    def sections(cls, loop: LoopRecord) -> Iterator[Section]:
        """Yields the latest searches, without those that are damaged."""
        # Here, as it imports scikit-learn.
        from posttrain.tune.report.study import search_fold
        from posttrain.tune.transfer.past import PastStudy

        searches = []
        for record in loop.done:
            if (tuning := tuning_of(record.state)) is not None:
                try:
                    folder = loop.workspace.artifacts.path(record.state.outputs[cls.name])
                    searches.append(PastStudy.read(folder, f"round {tuning.round}"))
                except (DamagedArtifactError, UserError) as error:
                    log.warning("%s; its search is left out", error)
        if not searches:
            return
        caption = (
            "The searches of the training's settings, the latest ones: the value of each trial on held-out records, "
            "and the settings that mattered. What a search decided is said with its round."
        )
        if len(searches) > _DRAWN:
            caption += f" The {len(searches) - _DRAWN} earliest searches are not drawn."
        detail = loop.detail / _DRAWN
        folds = [
            search_fold(each.name, each.goal, each.trials, detail, is_open=each is searches[-1])
            for each in searches[-_DRAWN:]
        ]
        yield Section(Message("Tuning"), [Text(caption, "caption"), *folds])

    @classmethod
    def _prepare(cls, context: RoundContext, tune: TuneConfig, values: str) -> "Tune":
        root = context.workspace.root
        base = adjusted_config(context.workspace, context.file_config or context.config)
        training = Train.prepare(replace(context, config=base))
        # Here, as `status` lists the stages without torch.
        from posttrain.tune.trainings.held_out import split_rows

        rows, held_out = split_rows(training.records, tune, base.data.columns, context.config.task, root)
        if tune.held_out.share is None:
            # A share comes of records that were checked with the training set.
            measured = measured_on(base, context.dataset(context.state.id("test")).records, root)
            require_no_overlap(held_out, measured, tune.held_out.data, base.data.steps)
            rows &= ~overlapping(training.records, held_out)
        states = finished_states(context.workspace)
        searched = {tuning.round: state.outputs[cls.name] for state in states if (tuning := tuning_of(state))}
        earlier = dict(list(searched.items())[-_EARLIER:])
        last = last_tuned(states)
        helpers = last.settings if last else {}
        return cls(training, base, rows, held_out, values, context.state.labels or 0, earlier, helpers)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the inputs of the training, the held-out records and the earlier searches."""
        earlier = {f"tuning {number}": id for number, id in self.earlier.items()}
        return self.training.inputs(context) | {"held out": content_digest(self.held_out)} | earlier

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the sections that decide the search, the settings in force, and what the rule was decided by."""
        tune = _section(context)
        return {
            "tune": search_settings(tune),
            "training": self.training.settings(replace(context, config=self.base)),
            "before": self._before(context),
            "configured": self._configured(context),
            "values": self.values,
            "labels": self.labels,
        }

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Searches; a killed search continues in its study."""
        from posttrain.tune.trainings.search import search_trainings
        from posttrain.tune.transfer.past import TASK_FILE
        from posttrain.tune.transfer.warm_start import WARM_START_FILE, warm_start_sentences
        from posttrain.tune.trial import TrialState

        tune, before = _section(context), self._before(context)
        trial = self._trial(context, tune)
        space = Space(tune.space, tune.constraints, "tune.space")
        current = self._point(context, space)
        study = scratch / "study"
        result = search_trainings(
            trial,
            tune,
            study,
            budget=tune.read_budget(),
            engine=tune.engine,
            workers=tune.workers,
            initial=tune.initial,
            current=current,
            past=self._past(context),
        )
        # Not tokens: a run that was killed amid a part has not counted those of its first steps.
        trained = sum(entry.step for entry in result.trials) / trial.parts
        best = result.best if result.best is not None and result.best.state is TrialState.FINISHED else None
        current_trial = result.current
        if current_trial is not None and current_trial.state in (TrialState.FINISHED, TrialState.FAILED):
            value_before = current_trial.latest
        else:
            # They are not a point of the space, or the scheduler stopped them: measured beside the study, to their end.
            value_before = _measure(trial, before, scratch / "before")
            trained += 1
        value, settings = value_before, {**(current_trial.settings if current_trial is not None else {}), **before}
        if best is not None and _is_better(best.latest, value_before, tune.searched.directions[0]):
            value, settings = best.latest, dict(best.settings)
        if (failed := next((entry for entry in result.trials if entry.error), None)) is not None:
            log.warning("  trial %d failed: %s", failed.number, failed.error)
        _write(out, settings, result.trials)
        # Both follow from data and trials alone.
        for name in (TASK_FILE, WARM_START_FILE):
            if (study / name).is_file():
                shutil.copyfile(study / name, out / name)
        return Tuning(
            round=context.number,
            rule=tune.when,
            values=self.values,
            records=self.labels,
            held_out=self.held_out.num_rows,
            metric=tune.metric,
            maximize=tune.searched.directions[0],
            settings=settings,
            before=before,
            configured=self._configured(context),
            value=value,
            value_before=value_before,
            trials=len(result.trials),
            trained=round(trained, 6),
            warm_start=[round_sentence(text) for text in warm_start_sentences(study)],
        ).as_dict()

    def _trial(self, context: RoundContext, tune: TuneConfig) -> "TrainingTrial":
        from posttrain.tune.trainings.search import training_parts
        from posttrain.tune.trainings.training_trial import TrainingTrial

        training, rows = self.training, self.rows
        # Trackers get the trainings of rounds, not tens of trials beside them.
        config = training.config.model_copy(update={"sinks": SinksConfig()})
        if training.teacher is not None:
            config = config.with_teacher(context.path(training.teacher.id))
        model = str(context.path(training.source).resolve())
        return TrainingTrial(
            base={
                "seed": context.seed(self.name) % MAX_INTEGER,
                "model": model,
                "data": training.dataset,
                "task": context.config.task.model_dump(mode="json"),
                "train": config.model_dump(mode="json"),
            },
            model=model,
            records=training.records.filter(pa.array(rows)),
            held_out=self.held_out,
            suite=tune.suite(bool(context.config.task.label_set)),
            metrics=tune.metrics,
            parts=training_parts(tune),
            difficulties=None if training.difficulties is None else training.difficulties[rows],
            weights=None if training.weights is None else training.weights[rows],
            limits=tune.limits,
        )

    def _before(self, context: RoundContext) -> dict[str, Any]:
        """Returns the settings in force until now, by the keys that the space sets."""
        return {key: tuned_value(context.config, key) for key in tuned_keys(_section(context))}

    def _configured(self, context: RoundContext) -> dict[str, Any]:
        return {key: tuned_value(self.base, key) for key in tuned_keys(_section(context))}

    def _point(self, context: RoundContext, space: Space) -> dict[str, Any] | None:
        """Returns the drawn values of the settings in force; None where they are not a point of the space."""
        base = {"train": self.training.config.model_dump(mode="json")}
        return find_point(space, base, self._before(context), self.helpers)

    def _past(self, context: RoundContext) -> list["PastStudy"]:
        """Returns the searches of earlier rounds."""
        from posttrain.tune.transfer.past import PastStudy

        return [PastStudy.read(context.path(id), f"round {number}") for number, id in self.earlier.items()]


def _not_tuned(values: Mapping[str, int]) -> Message:
    return Message("not tuned: {count} of {records} records can be held out, and {least} are needed", **values)


def search_settings(tune: TuneConfig) -> dict[str, Any]:
    """Returns the section without what changes no result: another engine or silence is not another search."""
    return tune.model_dump(mode="json", exclude={"one_shot", "engine", "workers", "silence"})


def _section(context: RoundContext) -> TuneConfig:
    tune = context.config.tune
    assert tune is not None, "the config asks for a search"
    return tune


def _rule_values(context: RoundContext) -> dict[str, float]:
    """Returns the values that the rule may use; drift is missing where it was not measured."""
    tuning = last_tuned(finished_states(context.workspace))
    return {
        "records": float(context.state.labels or 0),
        "tuned_records": float(tuning.records) if tuning else 0.0,
        "rounds_since_tuning": float(context.number - tuning.round) if tuning else math.inf,
        **drift_of(context),
    }


def _measure(trial: "TrainingTrial", settings: Mapping[str, Any], folder: Path) -> float | None:
    """Trains with settings outside of the study; returns the value, None where the training fails."""
    from posttrain.tune.context import Infeasible, TrialContext
    from posttrain.tune.objectives import read_measured
    from posttrain.tune.schedulers.base import Decision

    make_folder(folder)
    try:
        measured = trial(TrialContext(0, settings, folder, 0, None, 0, lambda step, value, tokens: Decision.CONTINUE))
    except (WorkError, Infeasible) as error:
        log.warning("  the training with the settings before failed: %s", error)
        return None
    (value,) = read_measured(measured, trial.metrics)
    return value if math.isfinite(value) else None


def _is_better(value: float | None, before: float | None, maximize: bool) -> bool:
    if value is None or before is None:
        return value is not None
    return value > before if maximize else value < before


def _write(out: Path, settings: Mapping[str, Any], trials: "Sequence[Trial]") -> None:
    """Writes settings and trials; without seconds, memory, errors and tokens, which a kill or a machine changes."""
    from posttrain.tune.study import TRIALS_FILE

    (out / BEST_FILE).write_text(yaml.safe_dump(dict(settings), sort_keys=True), encoding="utf-8")
    lines = []
    for trial in trials:
        line = trial.to_json()
        reports = [[report.step, report.value] for report in trial.reports]
        kept = {name: line[name] for name in ("number", "state", "value", "settings")}
        lines.append(json.dumps({**kept, "reports": reports}, sort_keys=True) + "\n")
    (out / TRIALS_FILE).write_text("".join(lines), encoding="utf-8")
