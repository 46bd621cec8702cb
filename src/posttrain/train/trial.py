"""Measure a setting in its own process, so that neither a crash nor leaked memory outlives it."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.jobs.local import LocalLauncher
from posttrain.jobs.memory import Memory
from posttrain.jobs.task import Outcome, Task, TaskContext
from posttrain.jobs.workers import WorkerRunner
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, remove_tree
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import EvaluationConfig, TrainConfig
from posttrain.train.monitor.config import ProfileConfig, SinksConfig
from posttrain.train.monitor.decisions import MonitorDecision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.optim.schedule import ScheduleConfig
from posttrain.train.recovery import read_recovery_log

Settings = Mapping[str, Any]
"""Values by key below ``train``, such as ``{"loader.prefetch": 4}``."""

MEASURED_STEPS = 4
"""Measured steps, after the warm-up."""
OUT_OF_MEMORY = "out of memory"
_NO_STEP = "no step was over"
_TRIAL_SHARE = 0.25  # of the time, at most, for one trial: a search has several

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Trial:
    """The measurement of a setting.

    Args:
        settings: the setting.
        rates: tokens per second of each step that counts.
        tokens: the most tokens of a step.
        start: seconds that the first steps took beyond what later ones do, as for compiling.
        memory_bytes: the most in use.
        data_wait: median share of a step spent waiting for data.
        seconds: seconds of the whole trial, loading included.
        problem: why it cannot be used; empty if it can.
    """

    settings: Settings
    rates: tuple[float, ...] = ()
    tokens: int = 0
    start: float = 0.0
    memory_bytes: int = 0
    data_wait: float = 0.0
    seconds: float = 0.0
    problem: str = ""

    def rate(self, steps: int) -> float:
        """Returns tokens per second over a whole training, start-up included; 0 if the setting fails."""
        if self.problem or not self.rates:
            return 0.0
        return 1 / (1 / median(self.rates) + self.start / (steps * max(self.tokens, 1)))


def with_settings(config: TrainConfig, settings: Settings) -> TrainConfig:
    """Returns the config with some values replaced.

    Raises:
        UserError: a key is unknown, or a value does not fit.
    """
    values = config.model_dump(mode="json")
    for key, value in settings.items():
        *path, last = key.split(".")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return TrainConfig.read(values, "--autotune")


@dataclass(frozen=True)
class ShortTraining:
    """Trains for a few steps, as the function of a task, whose argument is the config and the number of steps.

    The values of all steps so far are the task's messages; an answer that is False ends the training. Returns a mistake
    of the config.

    Args:
        source: the model's folder.
        records: records to train on.
        task, seed: those of the training.
    """

    source: Path
    records: pa.Table
    task: TaskConfig
    seed: int

    def __call__(self, context: TaskContext) -> UserError | None:
        from posttrain.train.stage import train

        config, steps = context.argument
        try:
            with suppress(_EnoughSteps):
                train(
                    self.source,
                    self.records,
                    config,
                    self.task,
                    seed=self.seed,
                    out=context.folder / "out",
                    scratch=context.folder / "scratch",
                    sink=_StepSink(context.send, steps),
                )
        except UserError as error:
            return error
        return None


class _EnoughSteps(Exception):
    """Raised to end a training after enough steps."""


class _StepSink:
    """Sends the values of each step, and ends the training after enough of them."""

    def __init__(self, send: Callable[[Any], Any], count: int) -> None:
        self._send, self._count = send, count
        self._steps: list[StepValues] = []

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        self._steps.append(values)
        if not self._send(tuple(self._steps)) or values.step + 1 >= self._count:
            raise _EnoughSteps

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        self._steps = list(steps)

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class _Measurement:
    """The handler of a trial's task.

    Args:
        warm: number of steps that do not count.
        most: number of steps that count.
        floor: tokens per second below which to give up.
    """

    warm: int
    most: int
    floor: float
    steps: Sequence[StepValues] = ()
    outcome: Outcome | None = field(default=None)

    def message(self, number: int, message: Sequence[StepValues], memory: Memory) -> bool:
        self.steps = message
        if len(self.counted) >= self.most:
            return False
        # The fastest step is compared: a single slow one, on a shared machine, does not end a trial.
        return len(self.counted) < 2 or max(step.tokens_per_second for step in self.counted) >= self.floor

    def show_life(self, number: int) -> bool:
        return True

    def ended(self, number: int, outcome: Outcome) -> None:
        self.outcome = outcome

    @property
    def counted(self) -> Sequence[StepValues]:
        return self.steps[self.warm :]

    @property
    def problem(self) -> str:
        """Why the task failed; empty if it did not."""
        if self.outcome is None or self.outcome.kind == "returned":
            return ""
        # The kernel kills a process as memory runs out.
        return OUT_OF_MEMORY if self.outcome.kind in ("out_of_memory", "killed") else self.outcome.error


class TrialRunner:
    """Measures settings on the first batches of a training, one process after another.

    Args:
        folder: folder of their files; emptied by each.
        source: the model's folder.
        records: records of the whole training.
        function: trains, in place of `ShortTraining`.
    """

    def __init__(
        self,
        folder: Path,
        source: Path,
        records: pa.Table,
        config: TrainConfig,
        task: TaskConfig,
        seed: int,
        function: Callable[[TaskContext], UserError | None] | None = None,
    ) -> None:
        self._folder, self._config = folder, config
        # Two more steps than are measured: compiled layers take them to compile.
        count = (MEASURED_STEPS + 2) * config.batch_size
        rows = np.arange(records.num_rows)
        if config.shuffle:
            rows = np.random.default_rng([seed, 0]).permutation(records.num_rows)
        records = records.take(pa.array(rows[:count]))
        self._records, self._batch_size = records.num_rows, 0
        self._function = function or ShortTraining(source, records, task, seed)

    def __call__(self, settings: Settings, floor: float, seconds: float) -> Trial:
        """Measures a setting.

        Args:
            floor: tokens per second below which to give up.
            seconds: after which to stop.

        Raises:
            UserError: the config is wrong, whatever the settings.
        """
        if self._batch_size:
            return self._run(settings, floor, seconds, MEASURED_STEPS)
        # Begins with one example a step, which is over soon: steps of a slow or busy machine may take minutes.
        self._batch_size, most = 1, self._config.batch_size
        first = self._run(settings, 0.0, seconds, 1)
        if first.problem or most == 1:
            return first
        example = first.tokens / median(first.rates)
        # Loading once, and as many steps as a trial has, in a share of the time.
        fitting = (seconds * _TRIAL_SHARE - first.seconds) / ((MEASURED_STEPS + 1) * example)
        self._batch_size = max(1, min(most, int(fitting)))
        if self._batch_size < most:
            log.info("  measured with a batch_size of %d: steps of %d examples take too long", self._batch_size, most)
        trial = self._run(settings, floor, seconds - first.seconds, MEASURED_STEPS)
        return first if trial.problem.startswith(_NO_STEP) else trial

    def _run(self, settings: Settings, floor: float, seconds: float, steps: int) -> Trial:
        """Measures so many steps, and warms up before."""
        began = time.monotonic()
        warm = 2 if with_settings(self._config, settings).compile else 1
        remove_tree(self._folder)
        make_folder(self._folder)
        task = Task(0, (self._short(settings, steps + warm), steps + warm), self._folder / "training")
        measurement = _Measurement(warm, steps, floor)
        # A runner of its own, and so a process.
        with WorkerRunner(self._function, LocalLauncher(), 1, math.inf) as runner:
            runner.start(task)
            while measurement.outcome is None and (left := began + seconds - time.monotonic()) > 0:
                runner.wait(measurement, left)
        return self._read(settings, measurement, task.folder, time.monotonic() - began)

    def _short(self, settings: Settings, steps: int) -> TrainConfig:
        quiet = {
            "epochs": math.ceil(steps / math.ceil(self._records / self._batch_size)),
            "batch_size": self._batch_size,
            "shuffle": False,  # the records are shuffled already, as the training would meet them
            "schedule": ScheduleConfig(name="constant", warmup=0),
            "checkpoint": CheckpointConfig(every_seconds=None),
            "sinks": SinksConfig(),
            "profile": ProfileConfig(),
            "evaluate": EvaluationConfig(),
            "max_steps": None,
            # These only make sense over a whole training.
            "phases": [],
            "weight": None,
        }
        return with_settings(self._config, settings).model_copy(update=quiet)

    def _read(self, settings: Settings, measurement: _Measurement, folder: Path, seconds: float) -> Trial:
        outcome = measurement.outcome
        if outcome is not None and isinstance(outcome.value, UserError):
            raise outcome.value
        if measurement.problem:
            return Trial(settings, seconds=seconds, problem=measurement.problem)
        log = read_recovery_log(folder / "scratch")
        if log.fitting_budget is not None:  # the training itself continued, with smaller micro-batches
            return Trial(settings, seconds=seconds, problem=OUT_OF_MEMORY)
        if log.auto_budget is not None:  # ``auto``
            settings = {**settings, "micro_batch_tokens": log.auto_budget}
        # Where the time is short, a step of the warm-up says more than nothing.
        counted = measurement.counted or measurement.steps[-1:]
        if not counted:
            return Trial(settings, seconds=seconds, problem=f"{_NO_STEP} after {seconds:.0f} s")
        usual = median(step.seconds for step in counted)
        return Trial(
            settings,
            rates=tuple(step.tokens_per_second for step in counted),
            tokens=max(step.tokens for step in measurement.steps),
            start=max(0.0, sum(step.seconds - usual for step in measurement.steps[: measurement.warm]))
            * self._batch_size
            / self._config.batch_size,
            memory_bytes=max(step.memory_bytes for step in measurement.steps),
            data_wait=median(step.data_wait for step in counted),
            seconds=seconds,
        )


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """Converts a trial to its JSON in ``autotune.json``."""
    return asdict(trial) | {"settings": dict(trial.settings)}
