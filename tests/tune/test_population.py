"""Population-based training: traces by hand, the paper's toy, the same result on all engines and after any kill."""

import json
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from faults import in_process
from posttrain.store.errors import UserError
from posttrain.store.files import sync_tree
from posttrain.testing.schedulers import MakeScheduler, SchedulerContract, SchedulerRun
from posttrain.tune import Choice, Float, Int, Space, TrialContext, TuneResult, minimize
from posttrain.tune.driver import Driver
from posttrain.tune.goal import Goal
from posttrain.tune.samplers.base import Proposal
from posttrain.tune.samplers.population import PerturbSampler
from posttrain.tune.schedulers.population import Pbt
from posttrain.tune.schedulers.registry import make_scheduler
from posttrain.tune.study import Study, read_study_events
from posttrain.tune.trial import Fork, Report, Trial, TrialState, lineage
from posttrain.tune.trial_folders import TrialFolders


class TestPbt(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda: Pbt(max_resource=9, population=4, interval=2)


class TestPairs(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda: Pbt(max_resource=9, population=2)


def jobs(run: SchedulerRun) -> list[tuple[int, int]]:
    """Trial and step of each run, in their order."""
    return [(arguments[0], arguments[1]) for name, arguments, _ in run.events if name == "started"]


# Value of each trial at the ends of the intervals.
CURVES = {
    0: {1: 0.4},
    1: {1: 0.1, 2: 0.3, 3: 0.30},
    2: {1: 0.3, 2: 0.2, 3: 0.19},
    3: {1: 0.2, 2: 0.5},
    4: {2: 0.05, 3: 0.04},
    5: {3: 0.01},
}


def test_a_population_of_four() -> None:
    run = SchedulerRun(Pbt(3, population=4), 6, value=lambda number, step: CURVES[number][step]).run()
    # After step 1 the worst, 0, continues as 4 from the best, 1; after step 2 the worst, 3, as 5 from the best, 4.
    assert run.forks == {4: Fork(parent=1, step=1, replaces=0), 5: Fork(parent=4, step=2, replaces=3)}
    first = [(0, 1), (1, 1), (2, 1), (3, 1)]
    # The child comes first: the checkpoint of its parent is that of step 1 until the parent continues.
    assert jobs(run) == [*first, (4, 2), (1, 2), (2, 2), (3, 2), (5, 3), (4, 3), (1, 3), (2, 3)]
    assert run.finished == {1, 2, 4, 5}


def test_the_worst_takes_over_the_best() -> None:
    run = SchedulerRun(Pbt(2, population=8), 10, value=lambda number, step: float(number)).run()
    assert run.forks == {8: Fork(0, 1, 7), 9: Fork(1, 1, 6)}


def test_a_failed_member_is_replaced_and_the_next_population_begins() -> None:
    run = SchedulerRun(Pbt(2, population=4), 9, value=lambda number, step: float(number), fails={1: 1}).run()
    # Of the three that are left the worst is replaced as well.
    assert run.forks[4] == Fork(0, 1, 1)
    assert run.forks[5] == Fork(0, 1, 3)
    assert jobs(run)[8:11] == [(6, 1), (7, 1), (8, 1)]


def test_without_trials_left_poor_members_go_on() -> None:
    run = SchedulerRun(Pbt(3, population=4), 5, value=lambda number, step: float(number)).run()
    assert run.forks == {4: Fork(0, 1, 3)}
    assert run.finished == {0, 1, 2, 4}


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_workers_do_not_change_a_population(workers: int) -> None:
    def value(number: int, step: int) -> float:
        return number * 7 % 13 + 1 / step

    fails = {3: 2, 9: 4}
    run, alone = (SchedulerRun(Pbt(6, 6), 24, count, value, fails=fails, seed=workers).run() for count in (workers, 1))
    assert run.forks == alone.forks
    assert run.steps == alone.steps


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "`max_resource`: Field required"),
        ({"max_resource": 5, "population": 1}, "`population`: Input should be greater than or equal to 2"),
        ({"max_resource": 5, "interval": 6}, "interval 6 does not lie between 1 and max_resource 5"),
        ({"max_resource": 5, "size": 4}, "unknown key `size`"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        make_scheduler({"name": "pbt", **options})
    assert problem in str(error.value)


def test_a_sampler_that_cannot_perturb_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"budget": 3, "scheduler": {"name": "pbt", "max_resource": 2}, "out": tmp_path / "out"}
    with pytest.raises(UserError, match=r"whose settings this sampler cannot perturb; leave .* use perturb"):
        minimize(lambda trial: 0.0, {"x": Float(0, 1)}, sampler="tpe", **options)
    assert not (tmp_path / "out").exists()


def ascend(trial: TrialContext) -> None:
    """Climbs 1.2 - h0 a^2 - h1 b^2 from (0.9, 0.9), and reports 1.2 - a^2 - b^2 (section 4.1 and Figure 2)."""
    state = trial.folder / "state"
    step, a, b = json.loads(state.read_text()) if state.exists() else (0, 0.9, 0.9)
    while True:
        if step:
            trial.report(step, a * a + b * b - 1.2)
        if step == 20:
            return
        for _ in range(4):
            a, b = a - 0.02 * trial["h0"] * a, b - 0.02 * trial["h1"] * b
        step += 1
        state.write_text(json.dumps([step, a, b]))


class Corners(PerturbSampler):
    """Begins with the two settings of Figure 2, each of which can climb one of two directions only."""

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal:
        return Proposal({"h0": 1.0, "h1": 0.0} if number % 2 == 0 else {"h0": 0.0, "h1": 1.0})


TOY = Space({"h0": Float(0, 1), "h1": Float(0, 1)})


@pytest.mark.slow
def test_a_population_beats_its_fixed_settings() -> None:
    fixed = minimize(ascend, TOY, budget=2, sampler=Corners(TOY))
    assert fixed.value == pytest.approx(0.9**2 * (1 + 0.98**160) - 1.2)
    scheduler = {"name": "pbt", "max_resource": 20, "population": 4}
    values = [
        -minimize(ascend, TOY, budget=23, sampler=Corners(TOY, seed), scheduler=scheduler).value for seed in range(3)
    ]
    # A fixed setting climbs one direction, to 0.358 of 1.2; the population climbs both.
    assert min(values) > 0.6 > -fixed.value
    assert max(values) > 1.0


SETTINGS = {"x": Float(1e-3, 1, log=True), "depth": Int(1, 8), "kind": Choice(["a", "b"])}


def local_walk() -> Callable[[TrialContext], None]:
    """Returns a function that can be sent to a process, as one of this module cannot."""

    def walk(trial: TrialContext) -> None:
        import json

        # A path towards 0 by steps that hang on the settings; the checkpoint is the whole path.
        state = trial.folder / "state"
        path = json.loads(state.read_text()) if state.exists() else [1.0]
        while True:
            if len(path) > 1:
                trial.report(len(path) - 1, path[-1])
            if len(path) == 7:
                return
            path.append(path[-1] * (1 - trial["x"] * trial["depth"] / (9 if trial["kind"] == "a" else 18)))
            (trial.folder / "new").write_text(json.dumps(path))
            (trial.folder / "new").replace(state)

    return walk


def run(scheduler: str = "pbt", **options: Any) -> TuneResult:
    choice = {"name": scheduler, "population": 4, "max_resource": 6}
    return minimize(local_walk(), SETTINGS, **{"budget": 9, "scheduler": choice, "seed": 3, **options})


def outcome(trials: Sequence[Trial]) -> list[Any]:
    return [
        (t.number, t.settings, t.state, t.value, [(r.step, r.value) for r in t.reports], t.fork, t.error)
        for t in trials
    ]


@pytest.fixture(scope="module")
def whole() -> TuneResult:
    return run()


def test_a_child_goes_on_from_the_checkpoint_of_its_parent(whole: TuneResult, tmp_path: Path) -> None:
    children = [trial for trial in whole.trials if trial.fork]
    assert len(children) == 5
    for trial in children:
        assert trial.fork is not None
        parent = whole.trials[trial.fork.parent]
        assert whole.trials[trial.fork.replaces].state is TrialState.STOPPED
        assert trial.reports[0].step == trial.fork.step + 1
        before = next(report.value for report in parent.reports if report.step == trial.fork.step)
        rate = trial.settings["x"] * trial.settings["depth"] / (9 if trial.settings["kind"] == "a" else 18)
        assert trial.reports[0].value == before * (1 - rate)
    assert all(trial.ended for trial in whole.trials)
    assert sum(trial.state is TrialState.FINISHED for trial in whole.trials) == 4


@pytest.mark.slow
def test_the_lineage_of_the_best(whole: TuneResult, tmp_path: Path) -> None:
    result = run(out=tmp_path)
    assert outcome(result.trials) == outcome(whole.trials)
    assert result.best is not None
    spans = lineage(result.trials, result.best.number)
    assert (spans[0].start, spans[-1].end) == (0, 6)
    assert all(before.end == after.start for before, after in pairwise(spans))
    assert len(spans) > 1
    # The folder of the best alone is left, and it holds the path through all spans.
    assert [path.name for path in (tmp_path / "trials").glob("0*")] == [f"{result.best.number:04d}"]
    path = json.loads((tmp_path / "trials" / f"{result.best.number:04d}" / "state").read_text())
    values = [report.value for span in spans for report in span.trial.reports if span.start < report.step <= span.end]
    assert path == [1.0, *values]
    assert result.schedule == spans


@pytest.mark.slow
def test_children_of_a_study_that_was_reopened_read_as_they_were(tmp_path: Path) -> None:
    result = run(out=tmp_path)
    assert outcome(read_study_events(tmp_path)[1]) == outcome(result.trials)
    assert outcome(run(out=tmp_path).trials) == outcome(result.trials)
    line = json.loads((tmp_path / "trials.jsonl").read_text().splitlines()[4])
    assert result.trials[4].fork is not None
    assert line["fork"] == {
        "parent": result.trials[4].fork.parent,
        "step": 1,
        "replaces": result.trials[4].fork.replaces,
    }


@pytest.mark.slow
def test_processes_are_inline(tmp_path: Path) -> None:
    inline = run()
    assert sum(trial.fork is not None for trial in inline.trials) == 5
    assert outcome(inline.trials) == outcome(run(out=tmp_path, engine="processes", workers=3).trials)


class Killed(BaseException):
    """Ends a session at once."""


def raise_at(patch: pytest.MonkeyPatch, point: int) -> None:
    """Has a session end before the ``point``-th of the writes that a child takes, or in the midst of its copy."""
    count = 0

    def before(original: Callable[..., Any], is_of_child: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += is_of_child(*arguments)
            if count == point:
                raise Killed
            return original(*arguments, **options)

        return call

    patch.setattr(Study, "start", before(Study.start, lambda *arguments: arguments[-1] is not None))
    patch.setattr(Study, "end", before(Study.end, lambda study, number, state, *_: state is TrialState.STOPPED))
    patch.setattr(Driver, "_run", before(Driver._run, lambda driver, trial: trial.fork is not None))
    patch.setattr(TrialFolders, "copy", before(TrialFolders.copy, lambda *arguments: True))
    patch.setattr("posttrain.tune.trial_folders.sync_tree", before(sync_tree, lambda folder: True))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 2])
def test_a_kill_between_the_writes_of_a_child(workers: int | None, tmp_path: Path) -> None:
    choice = {"name": "pbt", "population": 3, "max_resource": 3}
    options: dict[str, Any] = {"budget": 5, "scheduler": choice, "seed": 3}
    if workers:
        options |= {"engine": "processes", "workers": workers}
    function, whole = local_walk(), minimize(local_walk(), SETTINGS, **{**options, "engine": "inline", "workers": None})
    assert [trial.fork is not None for trial in whole.trials] == [False] * 3 + [True] * 2
    assert whole.best is not None
    points = [4] if workers else [1, 2, 3, 4, 5, 8]  # those of the first child, and of the second's copy
    for point in points:
        out = tmp_path / str(point)
        with pytest.MonkeyPatch.context() as patch:
            raise_at(patch, point)
            with pytest.raises(Killed):
                minimize(function, SETTINGS, out=out, **options)
        assert outcome(minimize(function, SETTINGS, out=out, **options).trials) == outcome(whole.trials), point
        folders = {path.name for path in (out / "trials").iterdir() if path.is_dir()} - {"locks"}
        assert folders == {f"{whole.best.number:04d}", "copies"}
        assert not list((out / "trials" / "copies").iterdir())


@pytest.mark.slow
def test_a_driver_that_is_killed_in_the_midst_of_a_copy(whole: TuneResult, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.tune.trial_folders.sync_tree", lambda folder: os.kill(os.getpid(), 9))
        # In a process of its own, so that nothing cleans up behind it.
        assert in_process(lambda: len(run(out=tmp_path).trials)).killed
    left = [path for path in (tmp_path / "trials" / "copies").iterdir() if path.is_dir()]
    assert len(left) == 1
    assert [trial.fork for trial in read_study_events(tmp_path)[1] if trial.fork]
    assert outcome(run(out=tmp_path).trials) == outcome(whole.trials)
    assert not list((tmp_path / "trials" / "copies").iterdir())


@pytest.mark.slow
def test_a_parent_that_is_gone_fails_its_child(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrialFolders, "copy", lambda folders, parent, child: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            run(out=tmp_path)
    fork = read_study_events(tmp_path)[1][4].fork
    assert fork is not None
    # As if another version had resumed the parent first.
    with Study(Goal(Space(SETTINGS)), folder=tmp_path) as study:
        study.resume(fork.parent, 2)
        study.report(fork.parent, Report(2, 0.5))
    trials = run(out=tmp_path).trials
    assert trials[4].error == f"the checkpoint of trial {fork.parent} at step 1 is gone"
