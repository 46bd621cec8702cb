"""Measure a setting in its own process, so that neither a crash nor leaked memory outlives it.

``python -m posttrain.train.trial FOLDER`` is that process; `TrialRunner` starts it and reads what it writes.
"""

import json
import logging
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.jobs.process_group import ProcessGroup
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import disk_errors, make_folder, remove_tree
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.config import ProfileConfig, SinksConfig
from posttrain.train.monitor.decisions import MonitorDecision
from posttrain.train.monitor.metrics import JsonlSink, StepValues, read_steps
from posttrain.train.optim.schedule import ScheduleConfig
from posttrain.train.recovery import read_recovery_log

Settings = Mapping[str, Any]
"""Values by key below ``train``, such as ``{"loader.prefetch": 4}``."""

MEASURED_STEPS = 4
"""Measured steps, after the warm-up."""
OUT_OF_MEMORY = "out of memory"
_POLL_SECONDS = 0.2
_SPEC, _STEPS, _LOG, _USER_ERROR = "trial.json", "steps.jsonl", "log.txt", "mistake.json"


@dataclass(frozen=True)
class Trial:
    """The measurement of a setting.

    Args:
        settings: the setting.
        rates: tokens a second of each step that counts.
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
        """Returns tokens a second over a whole training, start-up included; 0 if the setting fails."""
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


class TrialRunner:
    """Measures settings on the first batches of a training, one process after another.

    Args:
        folder: folder of their files; emptied by each.
        source: the model's folder.
        records: records of the whole training.
        command: program to start, with a folder as its last argument.
    """

    def __init__(
        self,
        folder: Path,
        source: Path,
        records: pa.Table,
        config: TrainConfig,
        task: TaskConfig,
        seed: int,
        command: Sequence[str] = (sys.executable, "-m", "posttrain.train.trial"),
    ) -> None:
        self._folder, self._source, self._config, self._task, self._seed = folder, source, config, task, seed
        self._command = list(command)
        # Two more steps than are measured: compiled layers take them to compile.
        count = (MEASURED_STEPS + 2) * config.batch_size
        rows = np.arange(records.num_rows)
        if config.shuffle:
            rows = np.random.default_rng([seed, 0]).permutation(records.num_rows)
        self._records = records.take(pa.array(rows[:count]))

    def __call__(self, settings: Settings, floor: float, seconds: float) -> Trial:
        """Measures a setting.

        Args:
            floor: tokens a second below which to give up.
            seconds: after which to stop.

        Raises:
            UserError: the config is wrong, whatever the settings.
        """
        began = time.monotonic()
        warm = 2 if with_settings(self._config, settings).compile else 1
        self._write(settings, warm)
        with disk_errors(self._folder), (self._folder / _LOG).open("wb") as log:
            process = ProcessGroup([*self._command, str(self._folder)], log)
        try:
            ended = self._wait(process, warm, floor, began + seconds)
        finally:
            process.kill()
        return self._read(settings, warm, ended, time.monotonic() - began)

    def _write(self, settings: Settings, warm: int) -> None:
        remove_tree(self._folder)
        make_folder(self._folder)
        a_pass = math.ceil(self._records.num_rows / self._config.batch_size)
        quiet = {
            "epochs": math.ceil((MEASURED_STEPS + warm) / a_pass),
            "shuffle": False,  # the records are shuffled already, as the training would meet them
            "schedule": ScheduleConfig(name="constant", warmup=0),
            "checkpoint": CheckpointConfig(every_seconds=None),
            "sinks": SinksConfig(),
            "profile": ProfileConfig(),
            # These only make sense over a whole training.
            "phases": [],
            "weight": None,
        }
        config = with_settings(self._config, settings).model_copy(update=quiet)
        spec = {
            "source": str(self._source),
            "train": config.model_dump(mode="json"),
            "task": self._task.model_dump(mode="json", exclude={"kind"}),
            "seed": self._seed,
            "steps": MEASURED_STEPS + warm,
        }
        with disk_errors(self._folder):
            (self._folder / _SPEC).write_text(json.dumps(spec), encoding="utf-8")
            parquet.write_table(self._records, self._folder / "records.parquet")

    def _wait(self, process: ProcessGroup, warm: int, floor: float, until: float) -> int | None:
        """Waits for the exit code; None if the trial is out of time or clearly slower."""
        while time.monotonic() < until:
            if (code := process.wait(_POLL_SECONDS)) is not None:
                return code
            counted = self._lines()[warm:]
            # The fastest step is compared: a single slow one, on a shared machine, does not end a trial.
            if len(counted) >= 2 and max(line["tokens_per_second"] for line in counted) < floor:
                return None
        return None

    def _lines(self) -> list[dict[str, Any]]:
        file = self._folder / _STEPS
        return read_steps(file) if file.exists() else []

    def _read(self, settings: Settings, warm: int, ended: int | None, seconds: float) -> Trial:
        mistake = self._folder / _USER_ERROR
        if mistake.exists():
            raise UserError(**json.loads(mistake.read_bytes()))
        if ended:
            return Trial(settings, seconds=seconds, problem=self._why(ended))
        if OUT_OF_MEMORY in self._output().lower():  # the training itself continued, with smaller micro-batches
            return Trial(settings, seconds=seconds, problem=OUT_OF_MEMORY)
        decided = read_recovery_log(self._folder / "scratch").auto_budget
        if decided is not None:  # ``auto``
            settings = {**settings, "micro_batch_tokens": decided}
        lines = self._lines()
        counted = lines[warm:]
        if not counted:
            return Trial(settings, seconds=seconds, problem=f"no step was over after {seconds:.0f} s")
        usual = median(line["seconds"] for line in counted)
        return Trial(
            settings,
            rates=tuple(line["tokens_per_second"] for line in counted),
            tokens=max(line["tokens"] for line in lines),
            start=max(0.0, sum(line["seconds"] - usual for line in lines[:warm])),
            memory_bytes=max(line["memory_bytes"] for line in lines),
            data_wait=median(line["data_wait"] for line in counted),
            seconds=seconds,
        )

    def _why(self, code: int) -> str:
        """Returns the last line of a process's output, or the signal that ended it."""
        if code < 0:
            return OUT_OF_MEMORY if -code == signal.SIGKILL else f"ended by {signal.Signals(-code).name}"
        output = self._output()
        last = output.splitlines()[-1] if output else f"exit code {code}"
        return OUT_OF_MEMORY if OUT_OF_MEMORY in last.lower() or "memoryerror" in last.lower() else last

    def _output(self) -> str:
        return (self._folder / _LOG).read_text(encoding="utf-8", errors="replace").strip()


class _EnoughSteps(Exception):
    """Raised to end a training after enough steps."""


class _TrialSink:
    """Writes each step to a file and ends the training after enough of them."""

    def __init__(self, path: Path, steps: int) -> None:
        self._lines, self._steps = JsonlSink(path), steps

    def write(self, values: StepValues, decisions: Sequence[MonitorDecision]) -> None:
        self._lines.write(values, decisions)
        if values.step + 1 >= self._steps:
            raise _EnoughSteps

    def rewind(self, steps: Sequence[StepValues], reported: Mapping[int, Sequence[MonitorDecision]]) -> None:
        self._lines.rewind(steps, reported)

    def close(self) -> None:
        self._lines.close()


def run_trial(folder: Path) -> None:
    """Trains as ``trial.json`` says, for a few steps."""
    from posttrain.train.stage import train

    spec = json.loads((folder / _SPEC).read_bytes())
    with suppress(OSError):  # on out-of-memory the kernel kills the trial, not its parent
        Path("/proc/self/oom_score_adj").write_text("800")
    with suppress(_EnoughSteps):
        train(
            Path(spec["source"]),
            parquet.read_table(folder / "records.parquet"),
            TrainConfig.read(spec["train"], _SPEC),
            TaskConfig.read(spec["task"], _SPEC),
            seed=spec["seed"],
            out=folder / "out",
            scratch=folder / "scratch",
            sink=_TrialSink(folder / _STEPS, spec["steps"]),
        )


def main(folder: Path) -> int:
    """Runs the trial's process and returns its exit code; a UserError is written to ``mistake.json``."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run_trial(folder)
    except UserError as error:
        mistake = {"what": error.what, "where": error.where, "fix": error.fix}
        (folder / _USER_ERROR).write_text(json.dumps(mistake), encoding="utf-8")
        return 2
    except (WorkError, RuntimeError, MemoryError) as error:
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}\n")
        return 1
    return 0


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """Converts a trial to its JSON in ``autotune.json``."""
    return asdict(trial) | {"settings": dict(trial.settings)}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
