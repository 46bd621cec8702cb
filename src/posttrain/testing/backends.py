"""The contract of backends that run functions, as a test class to inherit from, and functions to run.

class TestThreads(BackendContract):
    @pytest.fixture
    def make(self):
        return lambda function: ThreadBackend(function, workers=2)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from posttrain.tune.backends.base import Backend, Job, Outcome, TrialFunction
from posttrain.tune.context import TrialContext
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.trial import Memory, Report

MakeBackend = Callable[[TrialFunction], Backend]


@dataclass
class RecordingHandler:
    """Answers reports with decisions, and records what it is told.

    Args:
        decisions: by trial, in the order of its reports; CONTINUE after the last.
        ends: trials in this process that are to pause when they show life.
    """

    decisions: dict[int, list[Decision]] = field(default_factory=dict)
    reports: dict[int, list[Report]] = field(default_factory=dict)
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()

    def report(self, number: int, report: Report, memory: Memory) -> Decision:
        """Records a report."""
        assert min(memory) >= 0
        self.reports.setdefault(number, []).append(report)
        decisions = self.decisions.get(number)
        return decisions.pop(0) if decisions else Decision.CONTINUE

    def show_life(self, number: int) -> Decision:
        """Has a run in this process go on, or pause if it is the one of ``ends``."""
        return Decision.PAUSE if number in self.ends else Decision.CONTINUE

    def ended(self, number: int, outcome: Outcome) -> None:
        """Records an outcome."""
        self.outcomes.setdefault(number, []).append(outcome)


def count_up(trial: TrialContext) -> float:
    """Counts the steps up to ``steps`` in a file, and reports each; returns the sum of the numbers so far."""
    path = trial.folder / "state"
    step, total = map(int, path.read_text().split()) if path.exists() else (0, 0)
    while step < trial["steps"]:
        step += 1
        total += step
        path.write_text(f"{step} {total}")
        trial.report(step, total, tokens=10)
    return total


def misbehave(trial: TrialContext) -> float | None:
    """Fails in the way that ``how`` names."""
    how = trial["how"]
    if how == "raise":
        raise ValueError("the learning rate\nis too large")
    if how == "memory":
        raise MemoryError
    if how == "text":
        return "much"  # type: ignore[return-value]
    return None


def measure_two(trial: TrialContext) -> tuple[float, float]:
    """Reports the values of two objectives by name, and returns others in their order."""
    trial.report(1, {"second": 2.0, "first": 1.0})
    return 3.0, 4.0


def show_life(trial: TrialContext) -> float:
    """Reports nothing, but that it gets on."""
    for _ in range(3):
        trial.show_life()
    return 1.0


def run_jobs(backend: Backend, jobs: Sequence[Job], handler: RecordingHandler) -> None:
    """Runs jobs to their ends, as many at a time as the backend has workers."""
    waiting, count = list(jobs), sum(map(len, handler.outcomes.values()))
    done = count + len(jobs)
    started = 0
    while sum(map(len, handler.outcomes.values())) < done:
        ended = sum(map(len, handler.outcomes.values())) - count
        while waiting and started - ended < backend.workers:
            backend.start(waiting.pop(0))
            started += 1
        backend.wait(handler, 60)


class BackendContract:
    """Tests what every backend promises; inherit and define the fixture ``make``, a function of a `TrialFunction`.

    A run's reports come in order, with its costs, and it does what the answer says; a paused trial goes on in its
    folder; and whatever goes wrong in a trial is its outcome, after which the backend runs others.
    """

    @pytest.fixture
    def make(self) -> MakeBackend:
        """Returns what makes a backend for a function."""
        raise NotImplementedError

    def test_reports_and_value(self, make: MakeBackend, tmp_path: Path) -> None:
        handler = RecordingHandler()
        with make(count_up) as backend:
            run_jobs(backend, [_job(tmp_path, number, steps=number + 1) for number in range(4)], handler)
        for number in range(4):
            reports = handler.reports[number]
            assert [report.step for report in reports] == list(range(1, number + 2))
            assert [report.tokens for report in reports] == [10 * report.step for report in reports]
            assert all(first.seconds <= second.seconds for first, second in pairwise(reports))
            (outcome,) = handler.outcomes[number]
            assert (outcome.kind, outcome.value, outcome.tokens) == ("returned", reports[-1].value, 10 * (number + 1))
            assert outcome.seconds >= reports[-1].seconds

    def test_a_paused_trial_goes_on_in_its_folder(self, make: MakeBackend, tmp_path: Path) -> None:
        handler = RecordingHandler({0: [Decision.CONTINUE, Decision.PAUSE]})
        with make(count_up) as backend:
            run_jobs(backend, [_job(tmp_path, 0, steps=4)], handler)
            assert [outcome.kind for outcome in handler.outcomes[0]] == ["interrupted"]
            run_jobs(backend, [_job(tmp_path, 0, start=2, steps=4)], handler)
        assert [report.step for report in handler.reports[0]] == [1, 2, 3, 4]
        # Costs are those of the run.
        assert [report.tokens for report in handler.reports[0]] == [10, 20, 10, 20]
        assert handler.outcomes[0][1].value == 10

    def test_a_stopped_trial_ends(self, make: MakeBackend, tmp_path: Path) -> None:
        handler = RecordingHandler({0: [Decision.STOP]})
        with make(count_up) as backend:
            run_jobs(backend, [_job(tmp_path, 0, steps=4), _job(tmp_path, 1, steps=1)], handler)
        assert [report.step for report in handler.reports[0]] == [1]
        assert handler.outcomes[0][0].kind == "interrupted"
        assert handler.outcomes[1][0].value == 1

    def test_a_trial_that_shows_life_may_be_silent(self, make: MakeBackend, tmp_path: Path) -> None:
        handler = RecordingHandler()
        with make(show_life) as backend:
            run_jobs(backend, [_job(tmp_path, 0)], handler)
        assert handler.reports == {}
        assert (handler.outcomes[0][0].kind, handler.outcomes[0][0].value) == ("returned", 1.0)

    def test_failures_are_outcomes(self, make: MakeBackend, tmp_path: Path) -> None:
        handler = RecordingHandler()
        kinds = ["raise", "memory", "text", "nothing"]
        with make(misbehave) as backend:
            run_jobs(backend, [_job(tmp_path, number, how=how) for number, how in enumerate(kinds)], handler)
        outcomes = dict(zip(kinds, (handler.outcomes[number][0] for number in range(len(kinds))), strict=True))
        assert outcomes["raise"].error == "ValueError: the learning rate is too large"
        assert outcomes["memory"].error == "out of memory"
        assert outcomes["nothing"].kind == "returned"
        assert outcomes["nothing"].value is None
        assert (outcomes["text"].kind, outcomes["text"].error[:10]) == ("failed", "ValueError")

    def test_values_of_several_objectives(self, make: MakeBackend, tmp_path: Path) -> None:
        handler = RecordingHandler()
        jobs = [
            Job(number, {}, tmp_path / f"{number:04d}", 0, None, seed=number, objectives=objectives)
            for number, objectives in enumerate([("first", "second"), ("first", "third")])
        ]
        with make(measure_two) as backend:
            run_jobs(backend, jobs, handler)
        assert [report.values for report in handler.reports[0]] == [(1.0, 2.0)]
        (outcome,) = handler.outcomes[0]
        assert (outcome.kind, outcome.value, outcome.others) == ("returned", 3.0, (4.0,))
        assert 1 not in handler.reports
        assert handler.outcomes[1][0].error == "ValueError: the objective third is missing: there is second, first"

    def test_the_clock_does_not_go_back(self, make: MakeBackend, tmp_path: Path) -> None:
        with make(count_up) as backend:
            before = backend.clock()
            run_jobs(backend, [_job(tmp_path, 0, steps=2)], RecordingHandler())
            assert backend.clock() >= before


def _job(folder: Path, number: int, start: int = 0, **settings: object) -> Job:
    return Job(number, settings, folder / f"{number:04d}", start, None, seed=number)
