"""The contract of schedulers, as a test class to inherit from, and runs of a scheduler on made-up curves.

class TestMedianStop(SchedulerContract):
    @pytest.fixture
    def make(self):
        return lambda: MedianStop(max_resource=9)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from posttrain.tune.schedulers.base import Decision, Promote, Scheduler, Start
from posttrain.tune.trial import Fork

MakeScheduler = Callable[[], Scheduler]

_OWN_END = 9  # steps of a trial whose scheduler knows no end


@dataclass
class SchedulerRun:
    """A study without settings: trials report a value at each step, and a scheduler decides.

    Args:
        scheduler: the scheduler.
        trials: that may be started.
        workers: trials at a time; which of them reports next is drawn.
        value: value of a trial at a step.
        length: step at which a trial ends by itself, by its number.
        fails: step at which a trial fails, by its number.
        seed: of the order of reports.

    Attributes:
        events: what happened, as name and arguments of the scheduler's method, with its answer.
        choices: every answer of `choose`, with the number of events before it and its argument.
        steps: the last step of each trial.
        notes: those that each trial was started with.
        paused: trials that may be promoted.
        forks: the checkpoints that trials went on from, by their number.
        values: the last value of each trial.
        failed: trials that have failed.
        finished: trials that came to the last step.
    """

    scheduler: Scheduler
    trials: int
    workers: int = 1
    value: Callable[[int, int], float] = lambda number, step: 1 / step + number * 7 % 13
    length: Mapping[int, int] = field(default_factory=dict)
    fails: Mapping[int, int] = field(default_factory=dict)
    seed: int = 0
    events: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)
    choices: list[tuple[int, bool, Start | Promote | None]] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    forks: dict[int, Fork] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)

    def run(self) -> "SchedulerRun":
        """Runs the study to its end."""
        generator = np.random.default_rng(self.seed)
        running: list[int] = []
        while True:
            while len(running) < self.workers:
                number = self._begin()
                if number is None:
                    break
                running.append(number)
            if not running:
                return self
            number = running[int(generator.integers(len(running)))]
            if not self._step(number):
                running.remove(number)

    def tell(self, name: str, *arguments: Any) -> Any:
        """Tells the scheduler what has happened, and returns its answer."""
        answer = getattr(self.scheduler, name)(*arguments)
        self.events.append((name, arguments, answer))
        return answer

    def _begin(self) -> int | None:
        can_start = len(self.steps) < self.trials
        choice = self.scheduler.choose(can_start)
        self.choices.append((len(self.events), can_start, choice))
        if choice is None:
            return None
        if isinstance(choice, Promote):
            assert choice.number in self.paused, f"trial {choice.number} was promoted and is not paused"
            self.paused.remove(choice.number)
            self.tell("started", choice.number, choice.resource, self.notes[choice.number])
            return choice.number
        assert can_start, "a trial was started though none may be"
        number = len(self.steps)
        self.steps[number], self.notes[number] = 0, dict(choice.notes)
        self.tell("started", number, choice.resource, self.notes[number])
        if choice.fork is not None:
            self._fork(number, choice.fork)
        return number

    def _fork(self, number: int, fork: Fork) -> None:
        """Continues a trial from another's checkpoint, and ends the one that it replaces."""
        assert fork.parent in self.paused, f"trial {fork.parent} has a child and is not paused"
        assert fork.step == self.steps[fork.parent], f"the checkpoint of trial {fork.parent} is of another step"
        assert fork.parent != fork.replaces, f"trial {fork.parent} ends for its own child"
        self.steps[number], self.forks[number] = fork.step, fork
        if fork.replaces in self.paused:
            self.paused.remove(fork.replaces)
            self.tell("ended", fork.replaces, self.values[fork.replaces])
        else:
            assert fork.replaces in self.failed, f"trial {fork.replaces} is replaced and neither paused nor failed"

    def _step(self, number: int) -> bool:
        """Has a trial run a step; returns whether it runs on."""
        self.steps[number] = step = self.steps[number] + 1
        if self.fails.get(number) == step:
            self.failed.add(number)
            self.tell("ended", number, None)
            return False
        limit = self.scheduler.max_resource
        value = self.values[number] = self.value(number, step)
        decision = self.tell("report", number, step, value)
        if decision is Decision.PAUSE:
            self.paused.add(number)
            return False
        if decision is Decision.STOP or step >= self.length.get(number, limit or _OWN_END):
            if step == (limit or _OWN_END):
                self.finished.add(number)
            self.tell("ended", number, value)
            return False
        return True


class SchedulerContract:
    """Tests what every scheduler promises; inherit and define the fixture ``make``, a function without arguments.

    A scheduler ends every study, whatever fails or ends early; promotes only paused trials; starts none where none may
    be started; runs none beyond its last step; changes nothing by a choice; and is restored by what happened.
    """

    @pytest.fixture
    def make(self) -> MakeScheduler:
        """Returns what makes a new scheduler."""
        raise NotImplementedError

    @pytest.mark.parametrize("trials", [1, 2, 5, 30])
    @pytest.mark.parametrize("workers", [1, 3])
    def test_a_study_ends(self, make: MakeScheduler, trials: int, workers: int) -> None:
        run = SchedulerRun(make(), trials, workers, seed=trials).run()
        assert 0 < len(run.steps) <= trials
        limit = run.scheduler.max_resource
        assert limit is None or max(run.steps.values()) <= limit
        # Nothing is left to do, however often one asks.
        assert run.scheduler.choose(False) is None

    def test_some_trial_comes_to_the_end(self, make: MakeScheduler) -> None:
        assert SchedulerRun(make(), 30, 2).run().finished

    def test_good_trials_come_further(self, make: MakeScheduler) -> None:
        run = SchedulerRun(make(), 30, value=lambda number, step: float(number % 10)).run()
        steps = {rank: [step for number, step in run.steps.items() if number % 10 == rank] for rank in (0, 9)}
        assert np.mean(steps[0]) >= np.mean(steps[9])

    def test_a_choice_changes_nothing(self, make: MakeScheduler) -> None:
        run = SchedulerRun(make(), 12, 2).run()
        asked, silent = make(), make()
        for name, arguments, answer in run.events:
            for can_start in (True, False, True):
                asked.choose(can_start)
            assert getattr(asked, name)(*arguments) == getattr(silent, name)(*arguments) == answer
            assert asked.choose() == silent.choose()

    @pytest.mark.parametrize("workers", [1, 4])
    def test_what_happened_restores_it(self, make: MakeScheduler, workers: int) -> None:
        run = SchedulerRun(make(), 20, workers, fails={3: 1, 7: 2}, length={5: 2}, seed=2).run()
        for stop in range(0, len(run.events) + 1, 3):
            restored = make()
            for name, arguments, _ in run.events[:stop]:
                getattr(restored, name)(*arguments)
            for at, can_start, choice in run.choices:
                if at == stop:
                    assert restored.choose(can_start) == choice
            for name, arguments, answer in run.events[stop:]:
                assert getattr(restored, name)(*arguments) == answer

    @pytest.mark.parametrize("seed", range(4))
    def test_failures_hold_nothing_up(self, make: MakeScheduler, seed: int) -> None:
        generator = np.random.default_rng(seed)
        fails = {number: int(generator.integers(1, 5)) for number in range(30) if generator.random() < 0.4}
        length = {number: int(generator.integers(1, 9)) for number in range(30) if generator.random() < 0.3}
        run = SchedulerRun(make(), 30, 3, fails=fails, length=length, seed=seed).run()
        assert len(run.steps) == 30

    def test_all_trials_may_fail(self, make: MakeScheduler) -> None:
        run = SchedulerRun(make(), 30, 2, fails=dict.fromkeys(range(30), 1)).run()
        assert len(run.steps) == 30
        assert not run.paused

    def test_equal_values(self, make: MakeScheduler) -> None:
        assert SchedulerRun(make(), 30, 2, value=lambda number, step: 1.0).run().finished

    def test_reports_may_skip_steps(self, make: MakeScheduler) -> None:
        scheduler = make()
        limit = scheduler.max_resource or _OWN_END
        for number in range(3):
            choice = scheduler.choose()
            assert isinstance(choice, Start)
            scheduler.started(number, choice.resource, dict(choice.notes))
            decision = scheduler.report(number, limit, float(number))
            assert decision is not Decision.CONTINUE or scheduler.max_resource is None
            if decision is not Decision.PAUSE:
                scheduler.ended(number, float(number))

    def test_trials_of_another_scheduler(self, make: MakeScheduler) -> None:
        scheduler = make()
        for number in range(3):
            scheduler.started(number, None, {})
            for step in range(1, 4):
                scheduler.report(number, step, 1.0)
            scheduler.ended(number, None if number == 1 else 1.0)
        assert scheduler.choose() is not None
