"""The contract of runners, as a test class to inherit from, and functions to run.

class TestThreads(RunnerContract):
    @pytest.fixture
    def make(self):
        return lambda function: ThreadRunner(function, workers=2)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from posttrain.jobs.memory import Memory
from posttrain.jobs.runner import Runner
from posttrain.jobs.task import Outcome, Task, TaskContext, TaskFunction

MakeRunner = Callable[[TaskFunction], Runner]


@dataclass
class RecordingHandler:
    """Answers messages, and records what it receives.

    Args:
        answers: by task, in the order of its messages; True after the last.
        ends: tasks in this process that end when they show life.
    """

    answers: dict[int, list[Any]] = field(default_factory=dict)
    messages: dict[int, list[Any]] = field(default_factory=dict)
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()

    def message(self, number: int, message: Any, memory: Memory) -> Any:
        """Records a message."""
        assert min(memory) >= 0
        self.messages.setdefault(number, []).append(message)
        answers = self.answers.get(number)
        return answers.pop(0) if answers else True

    def show_life(self, number: int) -> bool:
        """Continues a run in this process, unless it is one of ``ends``."""
        return number not in self.ends

    def ended(self, number: int, outcome: Outcome) -> None:
        """Records an outcome."""
        self.outcomes.setdefault(number, []).append(outcome)


def count_up(context: TaskContext) -> int | None:
    """Counts up to the argument in a file, and sends each number; returns the sum, or None where an answer is False."""
    path = context.folder / "state"
    step, total = map(int, path.read_text().split()) if path.exists() else (0, 0)
    while step < context.argument:
        step += 1
        total += step
        path.write_text(f"{step} {total}")
        if not context.send(step):
            return None
    return total


def misbehave(context: TaskContext) -> None:
    """Fails in the way that the argument names."""
    if context.argument == "raise":
        raise ValueError("the learning rate\nis too large")
    if context.argument == "memory":
        raise MemoryError


def show_life(context: TaskContext) -> bool:
    """Sends nothing, but that it makes progress; returns whether it was to continue."""
    lives = [context.show_life() for _ in range(3)]
    return all(lives)


def run_tasks(runner: Runner, tasks: Sequence[Task], handler: RecordingHandler) -> None:
    """Runs tasks to their ends, as many at a time as the runner has workers."""
    waiting, count = list(tasks), sum(map(len, handler.outcomes.values()))
    done = count + len(tasks)
    started = 0
    while sum(map(len, handler.outcomes.values())) < done:
        ended = sum(map(len, handler.outcomes.values())) - count
        while waiting and started - ended < runner.workers:
            runner.start(waiting.pop(0))
            started += 1
        runner.wait(handler, 60)


class RunnerContract:
    """Tests what every runner promises; inherit and define the fixture ``make``, a function of a `TaskFunction`.

    A task's messages come in order, and their answers reach it; it finds its folder again; and whatever goes wrong in a
    task is its outcome, after which the runner runs others.
    """

    @pytest.fixture
    def make(self) -> MakeRunner:
        """Returns what makes a runner for a function."""
        raise NotImplementedError

    def test_messages_and_value(self, make: MakeRunner, tmp_path: Path) -> None:
        handler = RecordingHandler()
        with make(count_up) as runner:
            run_tasks(runner, [_task(tmp_path, number, number + 1) for number in range(4)], handler)
        for number in range(4):
            assert handler.messages[number] == list(range(1, number + 2))
            (outcome,) = handler.outcomes[number]
            assert (outcome.kind, outcome.value, outcome.error) == ("returned", sum(range(number + 2)), "")
            assert outcome.seconds > 0

    def test_an_answer_ends_a_run_and_the_next_finds_its_folder(self, make: MakeRunner, tmp_path: Path) -> None:
        handler = RecordingHandler({0: [True, False]})
        with make(count_up) as runner:
            run_tasks(runner, [_task(tmp_path, 0, 4), _task(tmp_path, 1, 1)], handler)
            assert (handler.messages[0], handler.outcomes[0][0].value) == ([1, 2], None)
            assert handler.outcomes[1][0].value == 1
            run_tasks(runner, [_task(tmp_path, 0, 4)], handler)
        assert handler.messages[0] == [1, 2, 3, 4]
        assert handler.outcomes[0][1].value == 10

    def test_a_task_that_shows_life_may_be_silent(self, make: MakeRunner, tmp_path: Path) -> None:
        handler = RecordingHandler()
        with make(show_life) as runner:
            run_tasks(runner, [_task(tmp_path, 0)], handler)
        assert handler.messages == {}
        assert (handler.outcomes[0][0].kind, handler.outcomes[0][0].value) == ("returned", True)

    def test_failures_are_outcomes(self, make: MakeRunner, tmp_path: Path) -> None:
        handler = RecordingHandler()
        kinds = ["raise", "memory", "nothing"]
        with make(misbehave) as runner:
            run_tasks(runner, [_task(tmp_path, number, how) for number, how in enumerate(kinds)], handler)
        raised, memory, nothing = (handler.outcomes[number][0] for number in range(len(kinds)))
        assert (raised.kind, raised.error) == ("failed", "ValueError: the learning rate is too large")
        assert (memory.kind, memory.error) == ("out_of_memory", "out of memory")
        assert (nothing.kind, nothing.value) == ("returned", None)
        assert "too large" in (tmp_path / "errors" / "0000.txt").read_text()

    def test_the_clock_does_not_go_back(self, make: MakeRunner, tmp_path: Path) -> None:
        with make(count_up) as runner:
            before = runner.clock()
            run_tasks(runner, [_task(tmp_path, 0, 2)], RecordingHandler())
            assert runner.clock() >= before


def _task(folder: Path, number: int, argument: Any = None) -> Task:
    return Task(number, argument, folder / f"{number:04d}")
