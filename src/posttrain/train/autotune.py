"""Find the settings with the most tokens per second on this machine, by measuring, in a bounded time.

Coordinate search from the config's settings; then the best two are measured again in turns, because the speed of
a shared machine varies by a third.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import yaml

from posttrain.models.precision import choose_precision, count_weights
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import make_folder, remove_tree, write_atomically
from posttrain.store.progress import progress_bar
from posttrain.train.config import TrainConfig
from posttrain.train.standalone import CONFIG, TUNED, TrainJobConfig
from posttrain.train.trial import OUT_OF_MEMORY, Settings, Trial, TrialRunner, trial_to_json, with_settings

log = logging.getLogger("posttrain")

_WORK_FOLDER = ".autotune"
_TOKENS_KEY = "micro_batch_tokens"
_MIN_TOKENS = 256
_DEFAULT_TOKENS = 8192
_CHOICES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("compile", (False, True)),
    ("recompute", ("none", "50%", "full")),
    ("loader.prefetch", (2, 8)),
    ("loader.workers", (0, 1, 2)),
)
_SEARCH_SHARE = 0.6  # share of the time; the rest is for the best two
_MIN_GAIN = 1.03  # below it the gain is within noise
_GIVE_UP_BELOW = 0.65  # of the best; a shared machine slows by less
_FINAL_REPEATS = 3  # of each of the best two
_LOADER_BOUND = 0.01  # share of a step spent waiting, above which the loader's settings are tried

Measure = Callable[[Settings, float, float], Trial]
"""Measures a setting, given the tokens per second below which to give up, and the seconds it may take."""


@dataclass(frozen=True)
class TuningResult:
    """The result of a search.

    Args:
        settings: the best, by key below ``train``.
        trials: all of them, in order, those of the best two in turns at the end.
        before, after: tokens per second of the config as it was, 0 where it could not be measured, and of the best.
    """

    settings: Settings
    trials: list[Trial]
    before: float
    after: float


def autotune_settings(
    out: Path,
    config: TrainJobConfig,
    records: pa.Table,
    fetch: Callable[[Path], Path],
    seconds: float,
    measure: Measure | None = None,
) -> TuningResult:
    """Searches the fastest settings and writes them to ``out/config.yaml``, and all trials to a file beside it.

    Args:
        out: made if missing; may hold an earlier tuning and nothing else.
        fetch: gives the folder of the model; may write it into the folder that it is given.
        seconds: that the measuring may take, about.
        measure: replaces `TrialRunner`.

    Raises:
        UserError: the folder holds something else, or the training cannot be begun.
        WorkError: nothing could be measured in this time.
    """
    if out.exists() and (not out.is_dir() or {trial.name for trial in out.iterdir()} - {CONFIG, TUNED, _WORK_FOLDER}):
        raise UserError("holds something else already", where=str(out), fix="name another --out")
    make_folder(out)
    work = out / _WORK_FOLDER
    steps = config.train.max_steps or config.train.epochs * -(-records.num_rows // config.train.batch_size)
    try:
        if measure is None:
            make_folder(work)
            source = fetch(work / "base").resolve()
            if config.train.precision == "auto":
                precision = choose_precision(count_weights(source))
                config = config.model_copy(update={"train": config.train.with_precision(precision)})
            measure = TrialRunner(work / "trial", source, records, config.train, config.task, config.seed)
        with _time_budget(seconds) as passed:
            tuned = search(config.train, measure, seconds, steps, passed)
    finally:
        remove_tree(work)
    best = config.model_copy(update={"train": with_settings(config.train, tuned.settings)})
    write_atomically(out / CONFIG, yaml.safe_dump(best.model_dump(mode="json"), sort_keys=False).encode())
    write_atomically(out / TUNED, json.dumps([trial_to_json(trial) for trial in tuned.trials], indent=1).encode())
    return tuned


def search(
    config: TrainConfig, measure: Measure, seconds: float, steps: int, passed: Callable[[], float] | None = None
) -> TuningResult:
    """Searches without files.

    Args:
        steps: steps of the whole training, over which compile time is spread.
        passed: returns the seconds so far; by default a wall clock.
    """
    began = time.monotonic()
    tuner = _SettingsSearch(config, measure, steps, passed or (lambda: time.monotonic() - began))
    tuner.until = _SEARCH_SHARE * seconds
    tuner.explore()
    if sum(not trial.problem for trial in tuner.trials) < 2:  # nothing to compare, so the time of the final is free
        tuner.until = seconds
        tuner.explore()
    if tuner.best is None:
        last = tuner.trials[-1].problem if tuner.trials else "no time"
        raise WorkError(f"no setting could be measured in {seconds:.0f} s: {last}; give it more --autotune-seconds")
    tuner.until = seconds
    winner, rate = tuner.decide()
    first = tuner.trials[0]
    return TuningResult(winner.settings, tuner.trials, first.rate(steps), rate)


class _SettingsSearch:
    def __init__(self, config: TrainConfig, measure: Measure, steps: int, passed: Callable[[], float]) -> None:
        self._measure, self._steps, self._passed = measure, steps, passed
        values = config.model_dump(mode="json")
        self._start = {_TOKENS_KEY: config.micro_batch_tokens}
        self._start |= {key: value for key, _ in _CHOICES if (value := _nested_value(values, key)) is not None}
        self.until = 0.0
        self.trials: list[Trial] = []
        self.best: Trial | None = None

    def explore(self) -> None:
        """Varies one setting after another, while there is time and progress."""
        trial = self._try(self._start) or (self.trials[-1] if self.trials else None)
        tokens = _most_tokens(trial or Trial(self._start))
        # The config as it is may not fit: nothing can be compared before one setting runs.
        while self.best is None and trial and trial.problem and tokens > _MIN_TOKENS:
            tokens //= 2
            trial = self._try({**self._start, _TOKENS_KEY: tokens})
        while self.best:
            before = self.best
            self._micro_batch()
            for key, values in _CHOICES:
                if key in self._start and self._is_worth_trying(key):
                    for value in values:
                        self._try({**self.best.settings, key: value, **self._with(key, value)})
            if self.best is before or self._passed() >= self.until:
                return

    def decide(self) -> tuple[Trial, float]:
        """Measures the best two in turns; returns the better and its tokens per second."""
        assert self.best is not None
        usable = {_settings_key(trial.settings): trial for trial in self.trials if trial.rate(self._steps)}
        ranked = sorted(usable.values(), key=lambda trial: -trial.rate(self._steps))[:2]
        rates: dict[str, list[float]] = {_settings_key(trial.settings): [] for trial in ranked}
        # In turns, and every second one reversed: a machine that slows down meanwhile slows both alike.
        order = [index for turn in range(_FINAL_REPEATS) for index in ((0, 1) if turn % 2 == 0 else (1, 0))]
        for index in order if len(ranked) == 2 else ():
            again = self._run(ranked[index].settings, 0.0)
            if again is None:
                break
            rates[_settings_key(again.settings)].append(again.rate(self._steps))
        if not all(rates.values()):
            return self.best, self.best.rate(self._steps)
        # A crash in the second measurement counts as 0, as it would in training.
        first, second = (median(rates[_settings_key(trial.settings)]) for trial in ranked)
        # Within 2 % the difference is noise, so that the one which leaves clearly more memory wins.
        close = min(first, second) * 1.02 >= max(first, second)
        saves = ranked[1].memory_bytes < 0.9 * ranked[0].memory_bytes
        takes_second = second > first if not close else saves
        return (ranked[1], second) if takes_second else (ranked[0], first)

    def _micro_batch(self) -> None:
        """Doubles the micro-batch while that helps and a step has enough tokens, else halve it while that helps."""
        assert self.best is not None
        for factor in (2.0, 0.5):
            before = self.best
            while True:
                whole = max(self.best.tokens, 1)  # a micro-batch above the batch changes nothing
                tokens = int(min(_most_tokens(self.best), whole if factor < 1 else math.inf) * factor)
                if tokens < _MIN_TOKENS or tokens >= 2 * whole:
                    break
                last = self.best
                self._try({**last.settings, _TOKENS_KEY: tokens})
                if self.best is last:
                    break
            if self.best is not before:
                return

    def _with(self, key: str, value: Any) -> dict[str, Any]:
        """Returns settings to change together with this one."""
        # Recomputation frees memory for a larger micro-batch.
        assert self.best is not None
        return {_TOKENS_KEY: 2 * _most_tokens(self.best)} if key == "recompute" and value != "none" else {}

    def _is_worth_trying(self, key: str) -> bool:
        assert self.best is not None
        if key.startswith("loader."):
            return self.best.data_wait > _LOADER_BOUND
        if key == "recompute":  # pays only if memory limits the micro-batch
            limited = any(trial.problem == OUT_OF_MEMORY for trial in self.trials)
            return limited or self.best.settings[key] != "none"
        return True

    def _try(self, settings: Settings) -> Trial | None:
        """Measures a new setting; it becomes the best if it is clearly better."""
        if any(_settings_key(trial.settings) == _settings_key(settings) for trial in self.trials):
            return None
        best = self.best.rate(self._steps) if self.best else 0.0
        trial = self._run(settings, _GIVE_UP_BELOW * best)
        if trial and trial.rate(self._steps) > _MIN_GAIN * best:
            self.best = trial
        return trial

    def _run(self, settings: Settings, floor: float) -> Trial | None:
        """Runs a trial; None if there is no time left."""
        # A trial takes about as long as the one before.
        remaining = self.until - self._passed()
        usual = self.trials[-1].seconds if self.trials else 0.0
        if remaining <= 0 or remaining < usual:
            return None
        try:
            trial = self._measure(settings, floor, remaining)
        except UserError as error:
            if not self.trials:
                raise  # the config itself is wrong, not a setting of ours
            trial = Trial(settings, problem=str(error))
        self.trials.append(trial)
        outcome = trial.problem or f"{trial.rate(self._steps):,.0f} tokens/s, {trial.memory_bytes / 1e9:.2f} GB"
        log.info("  %s: %s", ", ".join(f"{key}={_yaml(value)}" for key, value in settings.items()), outcome)
        return trial


@contextmanager
def _time_budget(seconds: float) -> Iterator[Callable[[], float]]:
    """Yields a clock of the seconds so far, shown as a progress bar."""
    began, shown = time.monotonic(), 0
    with progress_bar("tuning", max(1, int(seconds)), "s") as advance:

        def passed() -> float:
            nonlocal shown
            now = time.monotonic() - began
            advance(min(int(now), int(seconds)) - shown)
            shown = min(int(now), int(seconds))
            return now

        yield passed


def _most_tokens(trial: Trial) -> int:
    """Returns the tokens of a micro-batch; a guess for ``auto``."""
    tokens = trial.settings[_TOKENS_KEY]
    return tokens if isinstance(tokens, int) else _DEFAULT_TOKENS


def as_overrides(tuned: TuningResult) -> list[str]:
    """Formats the settings for ``--set``."""
    return [f"train.{key}={_yaml(value)}" for key, value in tuned.settings.items()]


def _yaml(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _settings_key(settings: Settings) -> str:
    return json.dumps(dict(settings), sort_keys=True)


def _nested_value(values: Any, key: str) -> Any:
    """Returns the value of a dotted key, or None."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return None
        values = values[part]
    return values
