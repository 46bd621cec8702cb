"""``posttrain.tune.minimize``: the best settings of any function."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.store.errors import UserError
from posttrain.store.files import hold_lock, make_folder, write_atomically
from posttrain.tune.backends.base import Backend, TrialFunction
from posttrain.tune.backends.registry import check_engine, open_backend
from posttrain.tune.budget import Budget, Price, read_gain
from posttrain.tune.driver import Driver
from posttrain.tune.progress import ProgressLines
from posttrain.tune.samplers.base import SearchContext
from posttrain.tune.samplers.initial import InitialPoints, read_points
from posttrain.tune.samplers.population import PopulationSampler
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.schedulers.registry import make_scheduler
from posttrain.tune.space import Space
from posttrain.tune.stopping import GainRule
from posttrain.tune.storage import STUDY_FILE
from posttrain.tune.study import Study
from posttrain.tune.transfer.past import PastStudy, Task, early_value, read_past, write_task
from posttrain.tune.transfer.warm_start import (
    WARM_START_FILE,
    WarmStart,
    WarmStartPoints,
    choose_warm_start,
    open_warm_start,
    predicted_points,
)
from posttrain.tune.trial import Span, Trial, lineage, schedule_to_json
from posttrain.tune.versions import Goal

BEST_FILE = "best.yaml"
"""The best settings so far, in a study's folder."""

_TRIALS_FOLDER, _LOCK = "trials", "lock"

_EXPORT_SECONDS = 1.0

_CHANGED = """\
The settings of the best trial, {number}, changed while it ran, as it went on from checkpoints of others.
Below are the last ones, which alone do not give its result again. trials/{number:04d} has what it ended with.
"""


@dataclass(frozen=True)
class TuneResult:
    """The outcome of a study.

    Attributes:
        best: the trial with the best value; None if no trial has one.
        trials: all trials, by number.
    """

    best: Trial | None
    trials: Sequence[Trial]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The best settings.

        Raises:
            ValueError: no trial has a value.
        """
        return self._best_or_error.settings

    @property
    def value(self) -> float:
        """The best value.

        Raises:
            ValueError: no trial has a value.
        """
        value = self._best_or_error.latest
        assert value is not None
        return value

    @property
    def schedule(self) -> Sequence[Span]:
        """The settings of the best trial by step: one span unless it went on from checkpoints of others.

        Raises:
            ValueError: no trial has a value.
        """
        return lineage(self.trials, self._best_or_error.number)

    @property
    def _best_or_error(self) -> Trial:
        if self.best is None:
            reason = next((trial.error for trial in self.trials if trial.error), "none was run")
            raise ValueError(f"no trial has a value: {reason}")
        return self.best


def minimize(
    function: TrialFunction,
    space: Space | Mapping[str, Any],
    *,
    budget: str | int | Budget,
    sampler: Any = None,
    scheduler: Any = "none",
    initial: Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
    out: str | Path | None = None,
    engine: str = "inline",
    workers: int | None = None,
    silence: float = 3600.0,
    storage: str | None = None,
    migrate: bool = False,
    warm_start: Any = (),
    features: Mapping[str, float] | None = None,
    stop: Any = None,
    price: Price | None = None,
    accelerators: int = 1,
) -> TuneResult:
    """Searches the settings with the least value of a function.

    With ``out`` the study is kept: the same call goes on where an earlier one stopped or was killed, and a larger
    budget continues a finished study. In this process (``inline``) one seed gives the same trials.

    Args:
        function: runs a trial, given a `TrialContext`: ``trial["lr"]`` is a setting, ``trial.report(step, value)``
            reports an intermediate value. Returns the final value, or None if that is the last one reported. A value
            that is NaN or infinite, and any exception, is a failed trial.
        space: a `Space`, or a mapping of names to `Float`, `Int`, `Choice`, `Derived`, fixed values, or to entries as a
            config has them, such as ``{"float": [1e-6, 1e-3], "log": True}``.
        budget: such as ``"50 trials"``, ``"30m"``, ``"2M tokens"``, ``"2 gpu-hours"``, several with commas, or a number
            of trials.
        sampler: ``random``, ``grid``, ``quasi_random``, ``tpe``, ``bohb``, ``gp``, ``rgpe``, ``cmaes``,
            ``evolutionary`` or ``staged``, or a mapping of ``name`` and options, or a new `Sampler`. By default
            ``tpe``, or the one that belongs to a scheduler of populations: ``perturb`` to ``pbt``, ``pb2`` to ``pb2``.
        scheduler: ``none``, ``successive_halving``, ``asha``, ``hyperband``, ``early_stopping``, ``extrapolation``,
            ``pbt`` or ``pb2``, with options such as ``{"name": "asha", "max_resource": 27}``, or a new `Scheduler`.
        initial: points that are tried first, such as ``[{"lr": 1e-3}]``; they count against the budget.
        seed: fixes every random choice of the search, and each trial's seed.
        out: folder that gets ``study.db``, ``trials.jsonl``, ``best.yaml`` and the trials' folders; None keeps nothing.
        engine: ``inline``; ``processes``, ``ray`` or ``slurm`` for several trials at a time.
        workers: trials at a time; by default as many as there are cores.
        silence: seconds without a report after which a trial in a process counts as hanging.
        storage: a PostgreSQL database in place of ``study.db``.
        migrate: carry an earlier study's trials over to a space that has changed.
        warm_start: earlier studies to start from: a folder of studies, study folders, or a list of `PastStudy`.
        features: numbers that say which earlier studies are like this one, by name, such as the logarithm of a size; a
            difference of half a unit counts little. They are kept with the study in ``out``.
        stop: ``{"gain": "0.1%"}`` starts no further trial once the best can be improved by less than this share of its
            value with 90% probability; a number is a difference of values.
        price: of an accelerator, for a budget such as ``"5 EUR"``.
        accelerators: that a trial uses, for budgets in GPU-hours and money.

    Returns:
        Best settings, best value and all trials.

    Raises:
        UserError: space, budget, sampler, scheduler or a point cannot be used; the study was begun with another space;
            another process works on it.
        WorkError: the first five trials have all failed.
    """
    check_engine(engine, workers)
    return optimize(
        lambda: open_backend(engine, function, workers, silence),
        space,
        budget=Budget.read(budget, price=price, accelerators=accelerators),
        sampler=sampler,
        scheduler=scheduler,
        initial=initial,
        seed=seed,
        out=out,
        storage=storage,
        migrate=migrate,
        stop=stop,
        past=_read_past(warm_start, out),
        task=lambda trials: Task({**(features or {}), **early_value(trials)}),
    )


def optimize(
    open_backend: Callable[[], Backend],
    space: Space | Mapping[str, Any],
    *,
    budget: str | int | Budget,
    sampler: Any = None,
    scheduler: Any = "none",
    initial: Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
    out: str | Path | None = None,
    storage: str | None = None,
    migrate: bool = False,
    objective: str = "value",
    maximize: bool = False,
    identity: Mapping[str, str] | None = None,
    to_config: Callable[[Trial], Mapping[str, Any]] | None = None,
    past: Sequence[PastStudy] = (),
    task: Callable[[Sequence[Trial]], Task] = lambda trials: Task(),
    defaults: Mapping[str, Any] | None = None,
    stop: Any = None,
) -> TuneResult:
    """Searches the settings with the best value, with any backend; `minimize` is this for a function.

    Args:
        open_backend: returns the backend, once everything has been checked.
        objective: name of what is measured.
        maximize: whether greater values are better.
        identity: what else decides the values, such as a digest of the data, by name; a study of another is refused.
        to_config: returns what ``best.yaml`` holds of a trial; its settings by default.
        past: earlier studies that this one may start from.
        task: returns the features of the task, given the trials so far.
        defaults: values of parameters that an earlier study may lack.

    The other arguments, the result and the errors are those of `minimize`.
    """
    if seed < 0:
        raise UserError(f"{seed} is no seed", where="seed", fix="give 0 or more")
    space, budget = Space.of(space), Budget.read(budget)
    chosen_scheduler = make_scheduler(scheduler)
    chosen_sampler = make_sampler(chosen_scheduler.sampler if sampler is None else sampler, space, seed, maximize)
    if chosen_scheduler.has_forks and not isinstance(chosen_sampler, PopulationSampler):
        what = "the scheduler trains a population, whose settings this sampler cannot perturb"
        raise UserError(what, where="sampler", fix=f"leave it out, or use {chosen_scheduler.sampler}")
    first = read_points(initial, space)
    gain = None if stop is None else read_gain(stop)
    if gain is not None and chosen_scheduler.has_forks:
        what = "settings of a population change as it trains, so that no gain can be predicted"
        raise UserError(what, where="stop", fix="leave it out, or use asha")
    folder = None if out is None else Path(out)
    with ExitStack() as stack:
        if folder is None:
            trials_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-tune-")))
        else:
            _check_folder(folder, storage)
            trials_folder = folder / _TRIALS_FOLDER
            make_folder(trials_folder)
            stack.enter_context(hold_lock(trials_folder / _LOCK, busy_message="another process works on this study"))
        study = stack.enter_context(
            Study(
                space,
                folder=folder,
                url=storage,
                name="tune" if folder is None or storage is None else folder.resolve().name,
                objective=objective,
                maximize=maximize,
                identity=identity,
                migrate=migrate,
            )
        )
        files = _Files(study, folder, to_config or (lambda trial: trial.settings))
        backend = stack.enter_context(open_backend())
        goal = Goal(objective, maximize, space)
        warm_start = _warm_start(study, goal, past, task, defaults)
        points = [*first, *(point for point in warm_start.points if point not in first)]
        if warm_start.sources:
            predicted = predicted_points(budget.trials)
            chosen_sampler = WarmStartPoints(
                chosen_sampler, points, warm_start.sources, lambda: task(study.trials), predicted
            )
        elif points:
            chosen_sampler = InitialPoints(chosen_sampler, points)

        rule = None if gain is None else GainRule(space, gain, budget, maximize=maximize, seed=seed, folder=folder)

        def keep_task() -> None:
            if folder is not None:
                write_task(folder, goal, task(study.trials), bool(warm_start.sources))

        keep_task()
        chosen_sampler.begin(SearchContext(budget, backend.workers, warm_start.sources))
        driver = Driver(study, chosen_sampler, chosen_scheduler, backend, budget, trials_folder, seed, rule)
        lines = ProgressLines(study, budget, lambda: driver.spent)

        def observe(trial: Trial) -> None:
            files(trial)
            lines(trial)

        try:
            driver.run(observe)
            if rule is not None:
                rule.keep(study.trials)
        finally:
            keep_task()
        files.write()
        return TuneResult(study.best, tuple(study.trials))


def _warm_start(
    study: Study,
    goal: Goal,
    past: Sequence[PastStudy],
    task: Callable[[Sequence[Trial]], Task],
    defaults: Mapping[str, Any] | None,
) -> WarmStart:
    """Returns what a study starts with, as it was chosen when the study began."""
    kept = study.folder is not None and (study.folder / WARM_START_FILE).is_file()
    if not past and not kept:
        return WarmStart((), (), ())
    return open_warm_start(
        study.folder, lambda: choose_warm_start(past, goal, task(study.trials), defaults), len(study.trials)
    )


def _read_past(warm_start: Any, out: str | Path | None) -> list[PastStudy]:
    if isinstance(warm_start, Sequence) and all(isinstance(study, PastStudy) for study in warm_start):
        return list(warm_start)
    return read_past(warm_start, Path(), exclude=None if out is None else Path(out))


class _Files:
    """Keeps ``best.yaml`` and ``trials.jsonl`` up to date; to be called with each trial that has reported or ended."""

    def __init__(self, study: Study, folder: Path | None, to_config: Callable[[Trial], Mapping[str, Any]]) -> None:
        self._study, self._folder, self._to_config = study, folder, to_config
        self._written: Trial | None = None
        self._last = 0.0

    def __call__(self, trial: Trial) -> None:
        if trial.ended:
            self._write_best()
            # The whole file is written anew: not for each of a thousand short trials.
            if time.monotonic() - self._last >= _EXPORT_SECONDS:
                self._study.export()
                self._last = time.monotonic()

    def write(self) -> None:
        """Writes both."""
        self._write_best()
        self._study.export()

    def _write_best(self) -> None:
        best = self._study.best
        if self._folder is None or best is None or best is self._written:
            return
        content = _to_yaml(self._to_config(best))
        spans = lineage(self._study.trials, best.number)
        if len(spans) > 1:
            # As a comment: a config of `posttrain train` has one value of each key.
            schedule = _CHANGED.format(number=best.number) + _to_yaml({"schedule": schedule_to_json(spans)})
            content = "".join(f"# {line}\n" for line in schedule.splitlines()) + content
        write_atomically(self._folder / BEST_FILE, content.encode())
        self._written = best


def _to_yaml(content: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
    return text


def _check_folder(folder: Path, storage: str | None) -> None:
    """Raises a `UserError` if the folder holds something that is no study."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    known = {STUDY_FILE, _TRIALS_FOLDER}
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file", where=str(folder), fix="name another --out")
    if names and not names & known:
        raise UserError("holds something else already", where=str(folder), fix="name another --out")
