"""A trial that is a training: it trains in parts, is measured behind each, and resumes from its checkpoint."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.precision import choose_precision
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically
from posttrain.train.callbacks import Callback, CallbackList, TrainingStopped
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.standalone import TrainJobConfig, train_standalone
from posttrain.tune.context import TrialContext, TrialInterrupted
from posttrain.tune.objectives import Measured
from posttrain.tune.trainings.measured_trial import MeasuredTrial, untrained_model
from posttrain.tune.trainings.settings import apply_settings

log = logging.getLogger("posttrain")

_MODEL, _EVALUATIONS = "model", "evaluations.json"


@dataclass(frozen=True, kw_only=True)
class TrainingTrial(MeasuredTrial):
    """The function of the study: trains with a trial's settings, and measures what was trained.

    A training is cut into equal parts. After each the training stops behind its checkpoint, the model is measured, and
    the value is reported; then the training resumes, in this run or in a later one. So the result is that of one
    training that was never stopped. A trial of a population finds a copy of its parent's folder, and continues from
    that checkpoint with its own settings.

    Args:
        parts: number of parts, which is the resource of a whole training.
        difficulties: float64 [records], a higher one is harder; None: as the config has it.
        weights: float64 [records], of the records in the loss; None: as the config has it.
    """

    parts: int
    difficulties: np.ndarray | None = None
    weights: np.ndarray | None = None

    def __call__(self, trial: TrialContext) -> Measured:
        """Runs a trial from where it is; returns the value of the trained model, of several metrics a list.

        Raises:
            Infeasible: the model is over a limit.
        """
        file = trial.folder / _EVALUATIONS
        values: list[Measured] = json.loads(file.read_bytes()) if file.exists() else []
        if values:  # its report may have been lost in a kill
            trial.report(len(values), values[-1])
        config = TrainJobConfig.read(apply_settings(self.base, trial.settings), f"trial {trial.number}")
        costs = self.shape_costs(config.train)  # before anything is trained
        if not values:
            self.check_latency(lambda: untrained_model(Path(self.model), config.train, config.task))
        while len(values) < self.parts:
            share = (len(values) + 1) / self.parts
            measure = _StopAndMeasure(share, self.parts, partial(self.measure, costs), trial.show_life)
            finished = self._train(trial.folder / _MODEL, config, measure)
            if measure.interruption is not None and not finished:
                raise measure.interruption
            if finished:
                lm = load_language_model(trial.folder / _MODEL, config.task, choose_precision())
                measure.value = self.measure(costs, lm)
            assert measure.value is not None, "the training was stopped, and its model measured"
            self.check_memory()
            values.append(measure.value)
            write_atomically(file, json.dumps(values).encode())
            trial.report(len(values), values[-1], tokens=measure.tokens)
            if finished:
                break
        return values[-1]

    def with_model(self, folder: Path) -> "TrainingTrial":
        """Returns the trial with the initial model in a folder."""
        return replace(self, model=str(folder))

    def _train(self, out: Path, config: TrainJobConfig, measure: "_StopAndMeasure") -> bool:
        """Trains until the callback stops it; returns whether the training is done."""
        level = log.level
        log.setLevel(logging.WARNING)  # what a training says is for those who run one
        try:
            # Data never change, and settings only from a parent's to those of a trial that continues from it.
            train_standalone(
                out,
                config,
                self.records,
                Path(self.model),
                fork=True,
                callbacks=CallbackList(measure),
                difficulties=self.difficulties,
                weights=self.weights,
            )
        except TrainingStopped:
            return False
        finally:
            log.setLevel(level)
        return True


class _StopAndMeasure(Callback):
    """Stops a training after a share of its steps, and measures the model.

    Args:
        share: of the steps.
        parts: Parts that the training is cut into.
        measure: returns the value of a model.
        show_life: called after each step, as a report is due after a part alone.

    Attributes:
        tokens: Tokens that the steps have processed.
        value: of the model that was stopped, or several; None before.
        interruption: why the run ends between two parts; None: it does not.
    """

    def __init__(
        self,
        share: float,
        parts: int,
        measure: Callable[[LanguageModel], Measured],
        show_life: Callable[[], None],
    ) -> None:
        self._share, self._measure, self._goal = share, measure, 0
        self._parts, self._show_life = parts, show_life
        self.tokens = 0
        self.value: Measured | None = None
        self.interruption: TrialInterrupted | None = None

    def on_begin(self, steps: int, total: int) -> bool:
        if total < self._parts:
            what = f"a training has {total} steps, and {self._parts} parts"
            raise UserError(what, where="tune.scheduler.max_resource", fix=f"give at most {total}, or train longer")
        # Rounded first: 3 / 9 of 9 steps is not to be 4 of them.
        self._goal = math.ceil(round(self._share * total, 6))
        return steps >= self._goal

    def on_step(self, step: StepValues) -> bool:
        self.tokens += step.tokens
        try:
            self._show_life()
        except TrialInterrupted as interruption:
            self.interruption = interruption  # raised behind the checkpoint, so that no step is lost
        return self.interruption is not None or step.step + 1 >= self._goal

    def on_stop(self, model: LanguageModel) -> None:
        if self.interruption is None:
            self.value = self._measure(model)
