"""Runs a study: asks the scheduler and the sampler, has a runner run trials, and records what happens."""

import math
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.jobs.memory import UNKNOWN_MEMORY, Memory
from posttrain.jobs.packing import MemoryPacking
from posttrain.jobs.runner import Runner
from posttrain.jobs.task import Outcome, Task
from posttrain.store.errors import WorkError
from posttrain.tune.budget import Budget, Spent
from posttrain.tune.events import Event
from posttrain.tune.runs import TrialEnd, TrialRun
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.samplers.population import PopulationSampler
from posttrain.tune.schedulers.base import Decision, Promote, Scheduler, Start
from posttrain.tune.study import Study
from posttrain.tune.trial import Fork, Report, Trial, TrialState
from posttrain.tune.trial_folders import TrialFolders

_RUNS_AFTER_KILLS = 1  # a trial whose process is killed runs again this often without a new step in between

_FAILURES = 5  # the study fails if its first five trials all do

_INFEASIBLE = 100  # trials that end a study, if none has a value: a budget that they do not use would never be spent

_CLOCK_SECONDS = 10.0  # between records of what is spent while nothing happens: a driver that is killed loses no more

Observer = Callable[[Trial], None]
"""Called with each trial that has reported, or has ended."""


class Driver:
    """One session of work on a study; the handler of its runner.

    Args:
        study: as it was opened; `run` replays its earlier events to the scheduler.
        sampler: proposes settings.
        scheduler: decides which trials run and how far.
        runner: runs them.
        budget: of the whole study, earlier sessions included.
        folder: gets a folder for each trial.
        seed: of the trials' own seeds.
    """

    def __init__(
        self,
        study: Study,
        sampler: Sampler,
        scheduler: Scheduler,
        runner: Runner,
        budget: Budget,
        folder: Path,
        seed: int = 0,
    ) -> None:
        self._study, self._sampler, self._scheduler, self._runner = study, sampler, scheduler, runner
        self._budget, self._seed = budget, seed
        self._folders = TrialFolders(study, folder)
        self._observe: Observer = lambda trial: None
        self._show_time: Callable[[int], None] = lambda running: None
        self._objectives = study.objectives
        self._interrupted: dict[int, None] = {}  # to be run on, in their order
        self._running: dict[int, Trial] = {}  # as they were when their run began
        self._began: dict[int, float] = {}  # when that was, in seconds of the study
        self._run_tokens: dict[int, int] = {}  # that the run has reported
        self._kills: Counter[int] = Counter()  # since the trial's last new step
        self._alone: set[int] = set()  # trials whose memory ran out beside others: they have it to themselves
        self._memory: dict[int, Memory] = {}
        known = (Memory(trial.memory_bytes, trial.gpu_memory_bytes) for trial in study.trials)
        self._packing = MemoryPacking(runner, known)
        self._failures = 0.0  # in a row since the session began; minus infinity after any other end
        self._infeasible = 0
        self._exhausted = False
        self._offset = study.clock - runner.clock()
        self._tokens = sum(trial.tokens for trial in study.trials)
        self._kept = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds that the study has been worked on, in all sessions."""
        return self._offset + self._runner.clock()

    @property
    def spent(self) -> Spent:
        """Costs of the study, over all sessions."""
        return Spent(self.seconds, self._tokens)

    def run(self, observe: Observer | None = None, show_time: Callable[[int], None] | None = None) -> None:
        """Works until the budget is spent or nothing is left to do.

        Args:
            observe: called after each report and each end.
            show_time: called with the number of trials that run, every few seconds where nothing else happens.

        Raises:
            WorkError: the first trials of the session have all failed.
        """
        self._observe, self._show_time = observe or self._observe, show_time or self._show_time
        longest = math.inf if self._runner.is_simulated else _CLOCK_SECONDS
        self._study.keep_budget(self._budget)
        self._resume()
        try:
            while True:
                if not self._is_spent():
                    self._fill()
                left = self._time_left
                if not self._running or left <= 0:
                    return
                seconds = min(left, longest)
                self._runner.wait(self, seconds if math.isfinite(seconds) else None)
                self._keep_time()
        finally:
            self._kill_running()
            self._study.keep_spent(self.spent)

    def message(self, number: int, message: Report, memory: Memory) -> Decision:
        """Records a report and returns the decision on it; `Handler.message`."""
        report, trial, before = message, self._study.trials[number], self._running[number]
        self._run_tokens[number] = report.tokens
        if trial.ended:
            return Decision.STOP
        self._memory[number] = memory.maximum(self._memory_of(number))
        self._packing.measure(memory)
        seconds, tokens = before.seconds + report.seconds, before.tokens + report.tokens
        values = self._objectives.complete(report.values, seconds, tokens, self._memory[number])
        if (bad := self._objectives.first_non_finite(values)) is not None:
            self._add_tokens(trial, tokens)
            error = f"the {bad[0]} at step {report.step} is {bad[1]}"
            memory = self._memory[number]
            self._end(number, TrialState.FAILED, error=error, seconds=seconds, tokens=tokens, memory=memory)
            return Decision.STOP
        self._keep_time()
        decision = Decision.CONTINUE
        if report.step > trial.step:  # a run that began before the last report repeats some
            whole = Report(report.step, values[0], seconds, tokens, values[1:])
            self._add_tokens(trial, tokens)
            self._kills.pop(number, None)  # it makes progress, however often it is killed
            self._study.report(number, whole, self.seconds)
            decision = self._scheduler.report(number, report.step, self._objectives.losses(values)[0])
            if decision is Decision.STOP:
                self._stop(number, whole)
            else:
                self._observe(self._study.trials[number])
        if decision is Decision.CONTINUE and (self._is_spent() or self._packing.is_over(self._remaining)):
            self._interrupted[number] = None
            decision = Decision.PAUSE
        if decision is Decision.PAUSE:
            self._study.set_running(number, False)
        return decision

    def show_life(self, number: int) -> bool:
        """Returns whether a run in this process continues, or its time is over; `Handler.show_life`."""
        self._keep_time()
        return self._time_left > 0

    def ended(self, number: int, outcome: Outcome) -> None:
        """Records the end of a run; `Handler.ended`."""
        before, trial = self._running.pop(number), self._study.trials[number]
        self._memory[number] = outcome.memory.maximum(self._memory_of(number))
        self._packing.measure(self._memory[number])
        end: TrialEnd | None = outcome.value
        kind = outcome.kind if end is None else end.kind
        if trial.ended or (trial.state is TrialState.PAUSED and kind not in ("failed", "infeasible")):
            self._folders.measure(number)
            self._folders.clean_up(number)
            return
        if kind == "interrupted":  # at the end of the budget, before it could report
            self._cut(number, before, outcome.seconds)
            self._interrupted.setdefault(number)
            self._study.set_running(number, False)
            return
        killed, beside_others = kind == "killed", bool(self._running)
        if self._kills[number] >= _RUNS_AFTER_KILLS if killed else kind != "out_of_memory" or not beside_others:
            self._end_with_run(number, before, outcome, end or TrialEnd("returned", error=outcome.error))
            return
        self._kills[number] += killed
        # Where trials share a machine's memory, it may be the kernel that kills one, as memory runs out.
        if beside_others and (not killed or self._runner.available_bytes() is not None):
            self._alone.add(number)
        self._cut(number, before, outcome.seconds)
        self._interrupted.setdefault(number)

    def _end_with_run(self, number: int, before: Trial, outcome: Outcome, end: TrialEnd) -> None:
        """Records the end of a run, and of its trial."""
        trial = self._study.trials[number]
        self._interrupted.pop(number, None)
        error, memory = end.error, self._memory_of(number)
        seconds, tokens = before.seconds + outcome.seconds, before.tokens + self._run_tokens[number]
        measured = end.values
        if not measured and trial.latest_values is not None:
            measured = self._objectives.select_measured(trial.latest_values)
        values = self._objectives.complete(measured, seconds, tokens, memory) if measured else ()
        if not error and not values:
            error = "it reported no value and returned none"
        elif not error and (bad := self._objectives.first_non_finite(values)) is not None:
            error = f"its {bad[0]} is {bad[1]}"
        self._add_tokens(trial, tokens)
        self._end(
            number,
            TrialState.FAILED if error else TrialState.FINISHED,
            values=() if error else values,
            error=error,
            seconds=seconds,
            tokens=tokens,
            memory=memory,
            feasible=end.kind != "infeasible",
            lost=outcome.kind == "killed",
        )
        self._folders.clean_up(number)

    def _cut(self, number: int, before: Trial, seconds: float) -> None:
        """Records the costs of a run that was killed; its trial is run again."""
        seconds, tokens = before.seconds + seconds, before.tokens + self._run_tokens[number]
        self._add_tokens(self._study.trials[number], tokens)
        self._study.cut(number, seconds, tokens, self.seconds)

    def _resume(self) -> None:
        """Replays earlier events to the scheduler, and completes what an earlier session was killed in."""
        study = self._study
        last = {event.trial.number: event.order for event in study.events if event.kind != "cut"}
        for event in study.events:
            self._replay(event, event.order == last[event.trial.number])
        for trial in study.trials:
            self._carry_out_fork(trial)
        for trial in study.trials:
            self._folders.clean_up(trial.number)

    def _replay(self, event: Event, last: bool) -> None:
        """Tells the scheduler what happened in an earlier session, and acts on a decision that was not carried out.

        Args:
            event: what happened.
            last: whether nothing has happened to the trial since.
        """
        if event.kind == "cut":
            return
        number, values = event.trial.number, event.values
        if event.kind == "start":
            self._scheduler.started(number, values["resource"], event.trial.notes)
            self._interrupted[number] = None
        elif event.kind == "end":
            self._interrupted.pop(number, None)
            self._scheduler.ended(number, self._loss(event.trial))
        else:
            loss, *_ = self._objectives.losses(event.trial.reports[-1].values)
            decision = self._scheduler.report(number, values["step"], loss)
            # A trial that went on was under another scheduler then.
            if last and decision is not Decision.CONTINUE:
                self._interrupted.pop(number, None)
            if last and decision is Decision.PAUSE:
                self._study.set_running(number, False)
            if last and decision is Decision.STOP:
                self._stop(number, event.trial.reports[-1])

    def _stop(self, number: int, report: Report) -> None:
        limit = self._scheduler.max_resource
        finished = limit is not None and report.step >= limit
        state = TrialState.FINISHED if finished else TrialState.STOPPED
        self._end(number, state, values=report.values, memory=self._memory_of(number))

    def _end(self, number: int, state: TrialState, *, error: str = "", feasible: bool = True, **values: Any) -> None:
        trial = self._study.end(number, state, self.seconds, error=error, **values)
        self._scheduler.ended(number, self._loss(trial))
        self._observe(trial)
        if not feasible:  # nothing is wrong with the function
            self._infeasible += 1
            if self._infeasible >= _INFEASIBLE and all(trial.latest is None for trial in self._study.trials):
                raise WorkError(f"none of the first {_INFEASIBLE} trials was feasible; the last: {error}")
            return
        self._failures = self._failures + 1 if state is TrialState.FAILED else -math.inf
        if self._failures >= _FAILURES and all(trial.latest is None for trial in self._study.trials):
            raise WorkError(f"the first {_FAILURES} trials have failed; the last: {error}")

    def _memory_of(self, number: int) -> Memory:
        return self._memory.get(number, UNKNOWN_MEMORY)

    def _loss(self, trial: Trial) -> float | None:
        return None if trial.values is None else self._objectives.losses(trial.values)[0]

    def _fill(self) -> None:
        """Gives free workers something to do."""
        while len(self._running) < self._runner.workers and self._packing.has_room(len(self._running)):
            if not self._alone.isdisjoint(self._running):
                return
            if self._interrupted:
                number = next(iter(self._interrupted))
                if number in self._running:  # it has just paused for want of memory: its process is still there
                    return
                if number in self._alone and self._running:
                    return
                del self._interrupted[number]
                self._study.set_running(number, True)
            else:
                can_start = not self._exhausted and self._budget.allows_start(self._study.trials)
                choice = self._scheduler.choose(can_start)
                if choice is None or (isinstance(choice, Start) and not can_start):
                    return
                # A trial that has just paused: its process may still use its folder.
                if any(number in self._running for number in choice.needed):
                    return
                if isinstance(choice, Promote):
                    number = choice.number
                    self._study.resume(number, choice.resource, self.seconds)
                    self._scheduler.started(number, choice.resource, self._study.trials[number].notes)
                else:
                    number = len(self._study.trials)
                    proposal = self._propose(number, choice.fork)
                    if proposal is None:
                        self._exhausted = True
                        continue
                    notes = {**proposal.notes, **choice.notes}
                    self._study.start(proposal.drawn, choice.resource, notes, self.seconds, choice.fork)
                    self._scheduler.started(number, choice.resource, notes)
                    self._carry_out_fork(self._study.trials[number])
            if not self._study.trials[number].ended:
                self._run(self._study.trials[number])

    def _propose(self, number: int, fork: Fork | None) -> Proposal | None:
        if fork is None:
            return self._sampler.propose(number, self._study.trials)
        assert isinstance(self._sampler, PopulationSampler), "it was checked"
        return self._sampler.propose_child(number, self._study.trials, fork)

    def _carry_out_fork(self, trial: Trial) -> None:
        """Gives a new trial the checkpoint that it continues from, and ends the trial that it replaces.

        Nothing happens where both have been done: a session that was killed in between is made up for by the next.
        """
        fork = trial.fork
        if fork is None:
            return
        parent, replaced = (self._study.trials[number] for number in (fork.parent, fork.replaces))
        begun = trial.ended or trial.reports or self._folders.path(trial.number).exists()
        # A backend that keeps no folders needs none.
        if not begun and (self._folders.path(parent.number).exists() or parent.ended):
            if parent.step != fork.step or parent.ended:
                self._interrupted.pop(trial.number, None)
                error = f"the checkpoint of trial {parent.number} at step {fork.step} is gone"
                self._end(trial.number, TrialState.FAILED, error=error, lost=True)
            else:
                self._folders.copy(parent.number, trial.number)
        if not replaced.ended:
            number = replaced.number
            self._interrupted.pop(number, None)
            values = replaced.latest_values or ()
            self._end(number, TrialState.STOPPED, values=values, memory=self._memory_of(number))
            self._folders.clean_up(number)

    def _run(self, trial: Trial) -> None:
        self._running[trial.number], self._began[trial.number] = trial, self.seconds
        self._run_tokens[trial.number] = 0
        if not self._scheduler.has_forks:  # which continue from checkpoints of others
            self._folders.make_room(len(self._running), {*self._running, *self._interrupted})
        folder = self._folders.path(trial.number)
        seed = int(np.random.SeedSequence([self._seed, trial.number]).generate_state(1)[0])
        # A copy, as in this process the function could change what best.yaml says, and the values of other trials.
        settings = deepcopy(dict(trial.settings))
        run = TrialRun(settings, trial.step, trial.resource, seed, self._objectives.measured)
        self._runner.start(Task(trial.number, run, folder))

    def _add_tokens(self, trial: Trial, tokens: int) -> None:
        """Adds what a trial has processed in all, over all its runs, to what was known of it."""
        self._tokens += max(0, tokens - trial.tokens)

    def _is_spent(self) -> bool:
        return self._budget.is_spent(self.spent)

    @property
    def _time_left(self) -> float:
        return self._budget.time_left(self.seconds)

    def _keep_time(self) -> None:
        """Records and shows what has been spent, as hours may pass in which nothing happens."""
        now = time.monotonic()
        if self._study.folder is not None and now - self._kept >= _CLOCK_SECONDS:
            self._kept = now
            self._study.keep_spent(self.spent)
        self._show_time(len(self._running))

    def _kill_running(self) -> None:
        """Ends runs that have not paused in time; they are resumed from their checkpoints by the next session."""
        for number, before in list(self._running.items()):
            self._runner.kill(number)
            del self._running[number]
            if self._study.trials[number].state is TrialState.RUNNING:
                self._cut(number, before, self.seconds - self._began[number])
                self._study.set_running(number, False)

    @property
    def _remaining(self) -> int:
        """The number of trials that run, and are not about to pause or to end."""
        return sum(self._study.trials[number].state is TrialState.RUNNING for number in self._running)
