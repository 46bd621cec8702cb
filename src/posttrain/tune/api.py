"""``posttrain.tune.minimize``: the best settings of any function."""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from posttrain.jobs.runner import SILENCE, Runner, check_engine
from posttrain.store.errors import UserError
from posttrain.store.files import hold_lock, make_folder
from posttrain.store.paths import check_path
from posttrain.tune.budget import Budget
from posttrain.tune.driver import Driver
from posttrain.tune.goal import Goal
from posttrain.tune.lint import check_edges, check_space
from posttrain.tune.objectives import KNEE, Objective, read_objectives
from posttrain.tune.progress import ProgressLines
from posttrain.tune.result import TuneResult
from posttrain.tune.runs import TrialFunction, check_objectives, open_trials
from posttrain.tune.samplers.base import Sampler
from posttrain.tune.samplers.initial import read_points
from posttrain.tune.samplers.population import PopulationSampler
from posttrain.tune.samplers.registry import AUTO, choose_sampler, make_sampler
from posttrain.tune.schedulers.base import Scheduler
from posttrain.tune.schedulers.registry import make_scheduler
from posttrain.tune.space import Space
from posttrain.tune.storage import LOCK, STUDY_FILE, TRIALS_FOLDER, begin_name, describe_location
from posttrain.tune.study import Study
from posttrain.tune.study_files import StudyFiles
from posttrain.tune.transfer.past import PastStudy, read_past, write_task
from posttrain.tune.transfer.warm_start import NO_TRANSFER, FirstPoints, Transfer
from posttrain.tune.trial import Trial
from posttrain.tune.trial_folders import check_trials

log = logging.getLogger("posttrain")


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
    silence: float = SILENCE,
    storage: str | None = None,
    objectives: Sequence[str | Objective | Mapping[str, Any]] = (),
    choose: str = KNEE,
    warm_start: Any = (),
    features: Mapping[str, float] | None = None,
) -> TuneResult:
    """Searches the settings with the least value of a function, or with the best of several.

    With ``out`` the study is kept: the same call continues where an earlier one stopped or was killed, and a larger
    budget continues a finished study. In this process (``inline``) one seed gives the same trials.

    Args:
        function: runs a trial, given a `TrialContext`: ``trial["lr"]`` is a setting, ``trial.report(step, value)``
            reports an intermediate value. Returns the final value, or None if that is the last one reported. A value
            that is NaN or infinite, and any exception, is a failed trial. With several objectives it returns and
            reports a sequence in their order without costs, or a mapping by name.
        space: a `Space`, or a mapping of names to `Float`, `Int`, `Choice`, `Derived`, fixed values, or to entries as a
            config has them, such as ``{"float": [1e-6, 1e-3], "log": True}``.
        budget: such as ``"50 trials"``, ``"30m"``, ``"2M tokens"``, several with commas, or a number of trials.
        sampler: ``auto``, ``random``, ``grid``, ``quasi_random``, ``tpe``, ``gp``, ``nsga2`` or ``staged``, or a
            mapping of ``name`` and options, or a new `Sampler`. By default ``auto``, which is ``gp`` for one objective,
            20 parameters and 300 trials at most, and else ``tpe``; with the scheduler ``pbt`` ``perturb``.
        scheduler: ``none``, ``successive_halving``, ``asha``, ``hyperband``, ``early_stopping`` or ``pbt``, with
            options such as ``{"name": "asha", "max_resource": 27}``, or a new `Scheduler`.
        initial: points that are tried first, such as ``[{"lr": 1e-3}]``; they count against the budget.
        seed: fixes every random choice of the search, and each trial's seed.
        out: folder that gets ``study.db``, ``trials.jsonl``, ``best.yaml`` and the trials' folders; None keeps nothing.
        engine: ``inline``; ``processes``, ``ray`` or ``slurm`` for several trials at a time.
        workers: trials at a time; by default as many as there are cores.
        silence: seconds without a report after which a trial in a process counts as hanging.
        storage: a PostgreSQL database in place of ``study.db``, such as ``postgresql://user:${PASSWORD}@host/name``
            with the password from the environment; needs ``out``.
        objectives: several objectives, such as ``["loss", Objective("accuracy", maximize=True), "seconds"]``; those
            named ``seconds``, ``tokens``, ``memory_bytes`` and ``gpu_memory_bytes`` are what a trial has spent. The
            result has their front.
        choose: the best trial of the front: its ``knee``, or such as ``loss within 1%``, which is that with the best
            of the other objectives among those whose loss is at most 1% worse than the best.
        warm_start: earlier studies to start from: a folder of studies, study folders, or a list of `PastStudy`.
        features: numbers that say which earlier studies are like this one, by name, such as the logarithm of a size; a
            difference of half a unit counts little. They are kept with the study in ``out``.

    Returns:
        Best settings, best value and all trials.

    Raises:
        UserError: space, budget, sampler, scheduler, objectives or a point cannot be used; the study was begun with
            another space or other objectives; another process works on it.
        WorkError: the first five trials have all failed, or none of the first hundred was feasible.
    """
    check_engine(engine, workers)
    goal = Goal(Space.of(space), read_objectives(objectives or ["value"], choose))
    check_objectives(goal.objectives, engine, starts_warm=bool(warm_start))
    result = optimize(
        lambda: open_trials(engine, function, workers, silence),
        goal,
        budget=budget,
        sampler=sampler,
        scheduler=scheduler,
        initial=initial,
        seed=seed,
        out=out,
        storage=storage,
        transfer=Transfer(_read_past(warm_start, out), lambda: features or {}),
    )
    for warning in [] if result.best is None else check_edges(goal.space, result.best):
        log.warning("  %s", warning)
    return result


def optimize(
    open_runner: Callable[[], Runner],
    goal: Goal,
    *,
    budget: str | int | Budget,
    sampler: Any = None,
    scheduler: Any = "none",
    initial: Sequence[Mapping[str, Any]] = (),
    current: Mapping[str, Any] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    storage: str | None = None,
    to_config: Callable[[Trial], Mapping[str, Any]] = lambda trial: trial.settings,
    transfer: Transfer = NO_TRANSFER,
) -> TuneResult:
    """Searches the settings with the best value, with any runner; `minimize` is this for a function.

    Args:
        open_runner: returns the runner, once everything has been checked.
        goal: what is searched.
        current: the point of the settings in force, which is tried first, but not in a study begun without it.
        to_config: returns what ``best.yaml`` holds of a trial; its settings by default.
        transfer: earlier studies that this one may start from.

    The other arguments, the result and the errors are those of `minimize`.
    """
    if seed < 0:
        raise UserError(f"{seed} is not a seed", where="seed", fix="give 0 or more")
    budget = Budget.read(budget)
    chosen_scheduler, chosen_sampler = _make_parts(
        goal, scheduler, sampler, seed, budget, starts_warm=bool(transfer.past)
    )
    describe_location(None, storage)  # before a folder is made
    first = read_points(initial, goal.space)
    if out is not None:
        check_path(Path(out))
    with ExitStack() as stack:
        trials_folder = _open_folder(stack, None if out is None else Path(out)).absolute()
        folder = None if out is None else trials_folder.parent  # a trial may change the current folder
        study = stack.enter_context(Study(goal, folder=folder, url=storage, name=begin_name(folder, storage)))
        check_trials(trials_folder, len(study.trials))
        files = StudyFiles(study, folder, to_config)
        runner = stack.enter_context(open_runner())
        warm_start = transfer.open(goal, folder, study.trials)
        if current is not None and (not study.trials or study.trials[0].drawn == current):
            first = [dict(current), *(point for point in first if point != current)]
        points = [*first, *(point for point in warm_start.points if point not in first)]
        first_sampler = FirstPoints(chosen_sampler, points, warm_start.sources, transfer, budget.trials)

        study.export()  # so that a folder with a task has trials, though none yet
        if folder is not None:
            write_task(folder, goal, transfer.features())
        for warning in check_space(goal.space):
            log.warning("  %s", warning)
        driver = Driver(study, first_sampler, chosen_scheduler, runner, budget, trials_folder, seed)
        lines = ProgressLines(study, budget, lambda: driver.spent)

        def observe(trial: Trial) -> None:
            files(trial)
            lines(trial)

        try:
            driver.run(observe, lines.show_time)
        finally:
            files.write()
        tried = next((trial for trial in study.trials if trial.drawn == current), None)
        return TuneResult(study.best, tuple(study.trials), tuple(study.front), tried)


def _make_parts(
    goal: Goal, scheduler: Any, sampler: Any, seed: int, budget: Budget, *, starts_warm: bool
) -> tuple[Scheduler, Sampler]:
    """Makes the scheduler and the sampler, and checks that they fit the goal and each other."""
    chosen = make_scheduler(scheduler)
    directions, count = goal.objectives.directions, len(goal.objectives)
    named = chosen.sampler if sampler is None else sampler
    if named == AUTO:
        named = choose_sampler(goal.space, count, budget.trials, starts_warm)
    proposer = make_sampler(named, goal.space, seed, directions)
    if count > 1 and not chosen.several_objectives:
        what = f"compares trials by one objective, and there are {count}"
        raise UserError(what, where="scheduler", fix="use none")
    if count > 1 and not proposer.several_objectives:
        what = f"searches one objective, and there are {count}"
        raise UserError(what, where="sampler", fix="use tpe, nsga2, gp, random, quasi_random or grid")
    if proposer.directions != directions:
        what = "was made for other objectives"
        raise UserError(what, where="sampler", fix=f"make it with maximize={directions}")
    if chosen.has_forks and not isinstance(proposer, PopulationSampler):
        what = "the scheduler trains a population, whose settings this sampler cannot perturb"
        raise UserError(what, where="sampler", fix=f"leave it out, or use {chosen.sampler}")
    return chosen, proposer


def _open_folder(stack: ExitStack, folder: Path | None) -> Path:
    """Returns the folder of the trials' folders, which is locked until the stack ends."""
    if folder is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-tune-")))
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file", where=str(folder), fix="name another --out")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names and not names & {STUDY_FILE, TRIALS_FOLDER}:
        raise UserError("holds something else already", where=str(folder), fix="name another --out")
    make_folder(folder / TRIALS_FOLDER)
    stack.enter_context(hold_lock(folder / TRIALS_FOLDER / LOCK, busy_message="another process works on this study"))
    return folder / TRIALS_FOLDER


def _read_past(warm_start: Any, out: str | Path | None) -> list[PastStudy]:
    if isinstance(warm_start, Sequence) and all(isinstance(study, PastStudy) for study in warm_start):
        return list(warm_start)
    return read_past(warm_start, Path(), exclude=None if out is None else Path(out))
