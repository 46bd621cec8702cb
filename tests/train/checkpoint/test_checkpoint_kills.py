"""``kill -9`` at calls that change the disk: the last committed checkpoint loads, bit for bit."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults import Outcome, Process
from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint

pytestmark = pytest.mark.slow

Make = Callable[..., Checkpoint]
Same = Callable[[Checkpoint | None, Checkpoint], bool]
StartSaver = Callable[..., Process]

COMMITTED = "after rename tmp/* step-{:09d}"
BACKGROUND = {"background": True}
# name: the actions of the process that dies, its config, the checkpoint (step, version) found before the event, the
# event, and the checkpoint found from the event on.
SCENARIOS: dict[str, tuple[list[list[Any]], dict[str, Any], tuple[int, int], str, tuple[int, int]]] = {
    "first": ([["save", 1, 0]], BACKGROUND, (0, 0), COMMITTED.format(1), (1, 0)),
    "next": ([["save", 3, 0]], BACKGROUND, (2, 0), COMMITTED.format(3), (3, 0)),
    "next, in the foreground": ([["save", 3, 0]], {"background": False}, (2, 0), COMMITTED.format(3), (3, 0)),
    "next, only one kept": ([["save", 3, 0]], BACKGROUND | {"keep_last": 1}, (2, 0), COMMITTED.format(3), (3, 0)),
    "the same step again": ([["save", 2, 1]], BACKGROUND, (2, 0), COMMITTED.format(2), (2, 1)),
    "rewind": ([["rewind", 1]], BACKGROUND, (2, 0), "after rename step-000000002 tmp/*/step-000000002", (1, 0)),
}


def trace(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_a_call_loses_no_committed_checkpoint(
    start_saver: StartSaver, folder: Path, tmp_path: Path, make: Make, same: Same, scenario: str
) -> None:
    actions, config, before, event, after = SCENARIOS[scenario]
    base = tmp_path / "base"
    if before[0]:
        base_checkpoints = Checkpoints(base)
        for step in (1, 2):
            base_checkpoints.save(step, make(step))

    def run(kill_at: int | None) -> tuple[Outcome, list[str]]:
        for old in (folder, tmp_path / "trace"):
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        if before[0]:
            shutil.copytree(base, folder)
        outcome = start_saver(actions, config=config, kill_at=kill_at).wait()
        return outcome, trace(tmp_path / "trace")

    outcome, events = run(None)
    assert outcome == Outcome(killed=False)
    assert event in events
    committed = events.index(event)
    # Each scenario starts elsewhere, so that together they reach most calls.
    for number in sorted({*range(list(SCENARIOS).index(scenario), len(events), 7), committed - 1, committed}):
        outcome, reached = run(number)
        assert outcome.killed
        assert reached == events[: number + 1], "the process behaves differently this time"
        step, version = after if event in reached else before
        checkpoints = Checkpoints(folder, CheckpointConfig(background=False, keep_last=2))
        result = checkpoints.latest()
        assert same(result, make(step, version)) if step else result is None, reached[-1]
        # A new process resumes normally: nothing is in its way, and no leftovers remain.
        for later in (4, 5):
            checkpoints.save(later, make(later))
        assert same(checkpoints.latest(), make(5)), reached[-1]
        names = sorted(path.name for path in folder.iterdir())
        assert names == [".lock", "step-000000004", "step-000000005", "tmp"], reached[-1]
        assert list((folder / "tmp").iterdir()) == [], reached[-1]


def test_the_events_follow_the_commit_protocol(
    start_saver: StartSaver, folder: Path, tmp_path: Path, make: Make
) -> None:
    """The events that the test above kills at; without them it would prove nothing."""
    checkpoints = Checkpoints(folder)
    for step in (1, 2):
        checkpoints.save(step, make(step))
    start_saver([["save", 3, 0]], config=BACKGROUND).wait()
    events = trace(tmp_path / "trace")
    expected = [
        "before write_tensors tmp/*/tensors.safetensors",
        "during write_tensors tmp/*/tensors.safetensors",
        "after write_tensors tmp/*/tensors.safetensors",
        "during write_bytes tmp/*/state.json",
        "during append tmp/*/steps.jsonl",
        "before fsync tmp/*/tensors.safetensors",
        "after fsync tmp/*/state.json",
        "after fsync tmp/*/steps.jsonl",
        "during write_bytes tmp/*/manifest.json",
        "before fsync tmp/*/manifest.json",
        "after fsync tmp/*",
        "before rename tmp/* step-000000003",
        "after rename tmp/* step-000000003",
        "after fsync .",
        "before rename step-000000001 tmp/*/step-000000001",
        "after rename step-000000001 tmp/*/step-000000001",
    ]
    positions = [events.index(event) for event in expected]
    assert positions == sorted(positions), (
        "files, then their folder, then the name, then its folder, and only then pruning"
    )
    assert any("unlink" in event for event in events[positions[-1] :])


def test_the_manifest_is_written_last(start_saver: StartSaver, tmp_path: Path) -> None:
    start_saver([["save", 3, 0]]).wait()
    events = trace(tmp_path / "trace")
    start = events.index("before write_bytes tmp/*/manifest.json")
    files = ("tensors.safetensors", "state.json", "steps.jsonl")
    assert {f"after fsync tmp/*/{file}" for file in files} <= set(events[:start])


def test_a_kill_after_the_snapshot_keeps_the_previous_checkpoint(
    start_saver: StartSaver, folder: Path, make: Make, same: Same
) -> None:
    Checkpoints(folder).save(1, make(1))
    assert start_saver([["save", 2, 0]], config=BACKGROUND, hang=True).wait().killed
    assert same(Checkpoints(folder).latest(), make(1))


def test_a_kill_while_putting_a_damaged_checkpoint_aside(
    start_saver: StartSaver, folder: Path, tmp_path: Path, make: Make, same: Same
) -> None:
    checkpoints = Checkpoints(folder)
    for number in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        (tmp_path / "trace").unlink(missing_ok=True)
        for step in (1, 2):
            checkpoints.save(step, make(step))
        (folder / "step-000000002" / "state.json").write_bytes(b"{}")
        outcome = start_saver([["latest"]], kill_at=number).wait()
        assert same(checkpoints.latest(), make(1))
        if not outcome.killed:
            break
    assert number > 3


def test_repeated_kills_at_random_times(
    start_saver: StartSaver, folder: Path, tmp_path: Path, make: Make, same: Same
) -> None:
    """Killed from outside, as a training is: the last committed checkpoint is found, or the next one."""
    generator = random.Random(0)
    reached = 0
    size = 100_000  # 2.8 MB, so that many kills fall into writing, hashing and reading back

    def last_committed() -> int:
        renamed = [line for line in trace(tmp_path / "trace") if line.startswith("after rename tmp/* step-")]
        return int(renamed[-1].removeprefix("after rename tmp/* step-")) if renamed else 0

    for _ in range(5):
        process = start_saver([["resume"]], config=BACKGROUND, size=size)
        while last_committed() <= reached:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.1))
        process.kill()
        result = Checkpoints(folder).latest()
        assert result is not None
        step = result.state["step"]
        assert last_committed() <= step <= last_committed() + 1
        assert same(result, make(step, 0, size))
        assert step > reached
        reached = step


def test_two_processes_may_share_a_folder(
    start_saver: StartSaver, folder: Path, tmp_path: Path, make: Make, same: Same
) -> None:
    """They may replace each other's checkpoints, but each checkpoint is complete and from one process."""
    processes = [
        start_saver(
            [["save", step, version] for step in range(1, 26)],
            config=BACKGROUND | {"keep_last": 3},
            trace=str(tmp_path / f"trace{version}"),
        )
        for version in (0, 1)
    ]
    assert [process.wait() for process in processes] == [Outcome(killed=False)] * 2
    checkpoints = Checkpoints(folder)
    assert checkpoints.steps()[-1] == 25
    for step in checkpoints.steps():
        result = checkpoints.at(step)
        assert result is not None
        assert same(result, make(step, result.state["version"]))
    assert list((folder / "tmp").iterdir()) == []
    assert list(folder.glob("damaged-*")) == []


def test_a_process_continues_when_another_is_killed(
    start_saver: StartSaver, folder: Path, tmp_path: Path, make: Make, same: Same
) -> None:
    traces = [tmp_path / "trace0", tmp_path / "trace1"]
    first, second = (start_saver([["resume"]], config=BACKGROUND, trace=str(trace)) for trace in traces)

    def commits(number: int) -> int:
        return sum(line.startswith("after rename tmp/* step-") for line in trace(traces[number]))

    def wait_for(number: int, count: int) -> None:
        end = time.monotonic() + 240
        while commits(number) < count:
            assert time.monotonic() < end, "it makes no progress"
            time.sleep(0.002)

    wait_for(0, 3)
    wait_for(1, 3)
    first.kill()
    wait_for(1, commits(1) + 3)
    second.kill()
    result = Checkpoints(folder).latest()
    assert result is not None
    assert same(result, make(result.state["step"]))
