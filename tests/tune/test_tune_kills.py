"""``kill -9`` the driver or a worker at any moment: the same call continues, and no trial is lost or doubled."""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import forked
import pytest

from posttrain.tune import Float, minimize
from posttrain.tune.context import TrialContext
from posttrain.tune.storage import read_name
from posttrain.tune.study import read_study_events
from posttrain.tune.trial import Trial, TrialState

pytestmark = pytest.mark.slow

TRIALS = 10

SCRIPT = """
import json, os, sys, time
from pathlib import Path

from posttrain.tune import Float, Int, minimize

engine, url, several = json.loads(Path("options.json").read_text())


def anytime(trial):
    state = trial.folder / "state"
    step = int(state.read_text()) if state.exists() else 0
    value = lambda: values()[0] if not several else values()
    values = lambda: ((trial["x"] - 0.3) ** 2 + trial["depth"] / 10 + 1 / step, trial["x"] / trial["depth"])
    if step:
        trial.report(step, value())
    while step < 9:
        with open("log", "a") as log:
            log.write(f"{trial.number} {step + 1} {os.getpid()}\\n")
        time.sleep(0.02)
        step += 1
        (trial.folder / "new").write_text(str(step))
        os.replace(trial.folder / "new", state)
        trial.report(step, value(), tokens=10)


result = minimize(
    anytime,
    {"x": Float(0, 1), "depth": Int(1, 4)},
    budget="10 trials",
    sampler="random",
    scheduler={"name": "none" if several else "hyperband", "max_resource": 9},
    objectives=["loss", "size"] if several else [],
    seed=4,
    out=Path("out"),
    engine=engine,
    workers=2 if engine == "processes" else None,
    storage=url,
)
Path("done").write_text(str(result.value))
"""


def outcome(trials: list[Trial]) -> list[tuple[Any, ...]]:
    return [
        (trial.settings, str(trial.state), trial.values, [(report.step, report.values) for report in trial.reports])
        for trial in trials
    ]


class Study:
    """A study in a process that can be killed."""

    def __init__(self, folder: Path, engine: str, url: str | None = None, several: bool = False) -> None:
        self.folder, self.url, self.kills = folder, url, 0
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        (folder / "options.json").write_text(json.dumps([engine, url, several]))

    def start(self) -> Any:
        return forked.start([str(self.folder / "script.py")], self.folder, self.folder / "output", "python")

    def finish(self) -> list[tuple[Any, ...]]:
        process = self.start()
        process.join()
        assert process.exitcode == 0, (self.folder / "output").read_text()
        assert (self.folder / "done").exists()
        out = self.folder / "out"
        trials = read_study_events(out, self.url, read_name(out, self.url))[1]
        lines = (self.folder / "out" / "trials.jsonl").read_text().splitlines()
        assert [json.loads(line)["number"] for line in lines] == list(range(TRIALS))
        return outcome(trials)

    def steps(self) -> list[list[int]]:
        log = self.folder / "log"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return [[int(part) for part in line.split()] for line in lines if line.endswith("\n")]

    def kill_after(self, steps: int) -> None:
        """Starts the study, and kills its driver when so many more steps were begun."""
        goal = len(self.steps()) + steps
        process = self.start()
        while len(self.steps()) < goal and process.is_alive():
            time.sleep(0.005)
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            self.kills += 1
        process.join()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    study = Study(tmp_path_factory.mktemp("reference") / "study", "inline")
    result = study.finish()
    states = Counter(state for _, state, _, _ in result)
    assert states["finished"] >= 1
    assert states["paused"] >= 5
    # Uninterrupted, no step is run twice.
    assert max(Counter((number, step) for number, step, _ in study.steps()).values()) == 1
    return result


@pytest.mark.parametrize("engine", [pytest.param("inline", marks=pytest.mark.long), "processes"])
def test_kill_the_driver(engine: str, reference: list[tuple[Any, ...]], tmp_path: Path) -> None:
    study, generator = Study(tmp_path / "study", engine), random.Random(f"driver {engine}")
    for _ in range(3):
        study.kill_after(generator.randint(1, 9))
    assert study.kills >= 2
    # Hyperband with random settings is synchronous: processes and kills change nothing.
    assert study.finish() == reference
    # A step is begun again only where a kill came before its checkpoint.
    repeated = Counter((number, step) for number, step, _ in study.steps())
    assert sum(count - 1 for count in repeated.values()) <= 2 * study.kills
    assert not any(map(is_alive, {pid for _, _, pid in study.steps()}))


@pytest.mark.long
def test_kill_the_driver_of_a_study_of_several_objectives(tmp_path: Path) -> None:
    whole, study = (Study(tmp_path / name, "inline", several=True) for name in ("whole", "study"))
    expected = whole.finish()
    for steps in (3, 9, 6, 8):
        study.kill_after(steps)
    assert study.kills >= 3
    # With one worker MO-ASHA is exact, too.
    assert study.finish() == expected
    folders = [folder / "out" / "front" for folder in (whole.folder, study.folder)]
    contents = [{path.name: path.read_text() for path in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1]
    best = [(folder / "out" / "best.yaml").read_text() for folder in (whole.folder, study.folder)]
    assert best[0] == best[1]
    assert "of the front by the rule: knee" in best[0]


@pytest.mark.long
def test_kill_the_driver_of_a_study_in_postgres(
    reference: list[tuple[Any, ...]], tmp_path: Path, postgres_url: str
) -> None:
    study = Study(tmp_path / "study", "processes", postgres_url)
    study.kill_after(7)
    study.kill_after(5)
    assert study.kills == 2
    assert study.finish() == reference
    assert not (tmp_path / "study" / "out" / "study.db").exists()


def test_kill_workers(reference: list[tuple[Any, ...]], tmp_path: Path) -> None:
    study = Study(tmp_path / "study", "processes")
    process, killed = study.start(), set[int]()
    while process.is_alive() and len(killed) < 3:
        steps = study.steps()
        number, pid = (steps[-1][0], steps[-1][2]) if steps else (0, 0)
        # Each trial at most once: one whose process dies twice without a new step in between has failed.
        if len(steps) > 5 * (len(killed) + 1) and number not in killed and is_alive(pid):
            os.kill(pid, signal.SIGKILL)
            killed.add(number)
        time.sleep(0.005)
    process.join()
    assert process.exitcode == 0, (tmp_path / "study" / "output").read_text()
    assert len(killed) == 3
    assert outcome(read_study_events(tmp_path / "study" / "out")[1]) == reference


def test_a_worker_that_is_killed_beside_others_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.jobs.local.free_bytes", lambda: 64 << 30)
    log, size = str(tmp_path / "log"), 200 << 20

    def function(trial: TrialContext) -> float:
        def note(word: str) -> str:
            with open(log, "a+") as file:
                file.write(f"{trial.number} {word}\n")
                file.seek(0)
                return file.read()

        note("begins")
        trial.report(1, trial["x"])  # the first is alone until its memory is known
        if trial.number == 1 and not (trial.folder / "killed").exists():
            (trial.folder / "killed").touch()
            block = bytearray(size)
            block[::4096] = b"x" * len(block[::4096])
            while "2 begins" not in note("waits"):
                time.sleep(0.05)
            time.sleep(1.5)  # until it has been measured
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5 if trial.number == 1 else 3)
        note("ends")
        return float(trial["x"])

    result = minimize(function, {"x": Float(0, 1)}, budget="5 trials", engine="processes", workers=3)
    lines = [line for line in Path(log).read_text().splitlines() if not line.endswith("waits")]
    first = lines.index("1 begins")
    second = lines.index("1 begins", first + 1)
    # Those beside it have ended before its second run, in which nothing else happens.
    assert sum(line.endswith("begins") for line in lines[:second]) - 1 == sum("ends" in line for line in lines[:second])
    assert lines[second : second + 2] == ["1 begins", "1 ends"]
    assert [str(trial.state) for trial in result.trials] == ["finished"] * 5
    assert result.trials[1].memory_bytes > size


@pytest.mark.long
def test_kills_after_each_step_lose_nothing(reference: list[tuple[Any, ...]], tmp_path: Path) -> None:
    study = Study(tmp_path / "study", "processes")
    script = (tmp_path / "study" / "script.py").read_text()
    report = "        trial.report(step, value(), tokens=10)\n"
    killing = report + "        if step in (5, 6, 7): os.kill(os.getpid(), 9)\n"
    (tmp_path / "study" / "script.py").write_text(script.replace(report, killing))
    assert study.finish() == reference
    runs = Counter(number for number, _ in {(number, pid) for number, step, pid in study.steps() if step > 5})
    assert max(runs.values()) >= 3  # more kills than a trial without progress may have


def test_a_trial_that_is_killed_again_and_again_has_failed(tmp_path: Path) -> None:
    study = Study(tmp_path / "study", "processes")
    script = (tmp_path / "study" / "script.py").read_text()
    killing = "        if trial.number == 3: os.kill(os.getpid(), 9)\n        step += 1\n"
    (tmp_path / "study" / "script.py").write_text(script.replace("        step += 1\n", killing))
    study.finish()
    trials = read_study_events(tmp_path / "study" / "out")[1]
    assert trials[3].state is TrialState.FAILED
    assert trials[3].error == "killed by SIGKILL, perhaps as memory ran out"
    assert [number for number, _, _ in study.steps()].count(3) == 2


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"
