"""Runs of trials as tasks: reports and their costs, decisions, values of several objectives, replayed curves."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from posttrain.jobs.inline import InlineRunner
from posttrain.jobs.task import Task
from posttrain.testing.runners import RecordingHandler, run_tasks
from posttrain.tune import Infeasible
from posttrain.tune.context import TrialContext
from posttrain.tune.runs import CurvePoint, RunTrial, TrialEnd, TrialFunction, TrialRun, replay
from posttrain.tune.schedulers.base import Decision


class DecidingHandler(RecordingHandler):
    """Continues trials after the answers that it was given."""

    def message(self, number: int, message: Any, memory: Any) -> Any:
        answer = super().message(number, message, memory)
        return Decision.CONTINUE if answer is True else answer


def trial(folder: Path, start: int = 0, objectives: tuple[str, ...] = ("value",), **settings: Any) -> Task:
    return Task(0, TrialRun(settings, start, None, 0, objectives), folder / "0000")


def run(function: TrialFunction, task: Task, handler: RecordingHandler) -> Any:
    run_tasks(InlineRunner(RunTrial(function)), [task], handler)
    return handler.outcomes[0][-1]


def count_up(trial: TrialContext) -> float:
    path = trial.folder / "state"
    step, total = map(int, path.read_text().split()) if path.exists() else (0, 0)
    while step < trial["steps"]:
        step += 1
        total += step
        path.write_text(f"{step} {total}")
        trial.report(step, total, tokens=10)
    return total


def test_reports_have_the_costs_of_the_run(tmp_path: Path) -> None:
    handler = DecidingHandler({0: [Decision.CONTINUE, Decision.PAUSE]})
    assert run(count_up, trial(tmp_path, steps=4), handler).value == TrialEnd("interrupted")
    ended = run(count_up, trial(tmp_path, start=2, steps=4), handler)
    assert ended.value == TrialEnd("returned", (10.0,))
    reports = handler.messages[0]
    assert [(report.step, report.value, report.tokens) for report in reports] == [
        *[(1, 1, 10), (2, 3, 20), (3, 6, 10), (4, 10, 20)],
    ]
    assert all(first.seconds <= second.seconds for first, second in pairwise(reports[2:]))
    assert ended.seconds >= reports[-1].seconds


def test_a_run_in_this_process_is_interrupted_where_it_shows_life(tmp_path: Path) -> None:
    def function(trial: TrialContext) -> float:
        trial.show_life()
        return 1.0

    for ends, end in ((frozenset({0}), TrialEnd("interrupted")), (frozenset(), TrialEnd("returned", (1.0,)))):
        assert run(function, trial(tmp_path), RecordingHandler(ends=ends)).value == end


def test_values_of_several_objectives(tmp_path: Path) -> None:
    def function(trial: TrialContext) -> tuple[float, float]:
        trial.report(1, {"second": 2.0, "first": 1.0})
        return 3.0, 4.0

    handler = DecidingHandler()
    assert run(function, trial(tmp_path, objectives=("first", "second")), handler).value.values == (3.0, 4.0)
    assert [report.values for report in handler.messages[0]] == [(1.0, 2.0)]
    failed = run(function, trial(tmp_path, objectives=("first", "third")), handler)
    assert failed.error == "ValueError: the objective third is missing: there is second, first"


def test_how_a_trial_fails(tmp_path: Path) -> None:
    def function(trial: TrialContext) -> Any:
        if trial["how"] == "limit":
            raise Infeasible("too large")
        return {"nothing": None, "text": "much"}[trial["how"]]

    ends = {how: run(function, trial(tmp_path, how=how), RecordingHandler()) for how in ("limit", "nothing", "text")}
    assert ends["limit"].value == TrialEnd("infeasible", error="too large")
    assert ends["nothing"].value == TrialEnd("returned")
    assert (ends["text"].kind, ends["text"].error[:10]) == ("failed", "ValueError")


def curve(settings: Mapping[str, Any]) -> list[CurvePoint]:
    return [CurvePoint(10.0 - step, seconds=settings["seconds"], tokens=5) for step in range(3)]


def test_a_replayed_trial_continues_after_a_pause_and_in_a_later_session(tmp_path: Path) -> None:
    handler = DecidingHandler({0: [Decision.PAUSE]})
    for runner in (replay(curve), replay(curve)):
        run_tasks(runner, [trial(tmp_path, seconds=2.0)], handler)
        start = handler.messages[0][-1].step
        run_tasks(runner, [trial(tmp_path, start=start, seconds=2.0)], handler)
        assert [(report.step, report.value, report.seconds, report.tokens) for report in handler.messages[0]] == [
            *[(1, 10, 2, 5), (2, 9, 2, 5), (3, 8, 4, 10)],
        ]
        assert runner.clock() == 6
        handler.messages.clear()
        handler.answers[0] = [Decision.PAUSE]


def test_a_broken_curve_is_a_failed_trial(tmp_path: Path) -> None:
    def unknown(settings: object) -> list[CurvePoint]:
        raise LookupError(f"no curve was recorded with {settings}")

    handler = RecordingHandler()
    run_tasks(replay(unknown), [trial(tmp_path, x=1)], handler)
    assert handler.outcomes[0][0].error == "LookupError: no curve was recorded with {'x': 1}"
