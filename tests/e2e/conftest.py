"""The demo in processes of its own, which can be killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import pyarrow.parquet as parquet
import pytest
from filelock import FileLock

from posttrain.loop.config import load_config
from posttrain.loop.status import status
from posttrain.store.workspace import Workspace

_TIMED = ("latency", "decision")


class Demo:
    """``posttrain demo --quick`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")

    def start(self) -> BaseProcess:
        return forked.start(["demo", "--quick", "--dir", str(self.folder)], self.folder.parent, self.log)

    def finish(self) -> None:
        process = self.start()
        process.join(300)
        assert process.exitcode == 0, self.log.read_text()

    def kill_after(self, seconds: float) -> bool:
        """Start it and ``kill -9`` it after a while; False if it was done by then."""
        return self._killed(self.start(), seconds)

    def done_before_a_kill(self, seconds: float) -> bool:
        """Start it and ``kill -9`` it once it has held the workspace for a while; True if it was done by then."""
        process = self.start()
        while process.is_alive() and not self._held_by(process.pid):
            time.sleep(0.02)
        return not self._killed(process, seconds)

    def _killed(self, process: BaseProcess, seconds: float) -> bool:
        process.join(seconds)
        process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL), self.log.read_text()
        return process.exitcode == -signal.SIGKILL

    def _held_by(self, pid: int | None) -> bool:
        try:
            return bool(json.loads((self.folder / ".posttrain" / "lock.json").read_bytes())["pid"] == pid)
        except FileNotFoundError:
            return False

    def seconds(self) -> float:
        """How long its rounds took."""
        with Workspace.open(self.folder, load_config(self.folder).store, write=False) as store:
            return sum(entry.seconds or 0.0 for entry in store.metadata.rounds())

    def outcome(self) -> dict[str, Any]:
        """All that two equal runs must share: everything but times."""
        with Workspace.open(self.folder, load_config(self.folder).store, write=False) as store:
            state = status(store, load_config(self.folder))
            assert state["champion"] is not None
            labels = {}
            for entry in store.metadata.rounds()[1:]:
                table = parquet.read_table(store.artifacts.path(entry.detail["labelled"]) / "labels.parquet")
                answers = zip(table["input_id"].to_pylist(), table["completion"].to_pylist(), strict=True)
                labels[str(entry.number)] = dict(answers)
            return {
                "champion": state["champion"]["id"],
                "rounds": [
                    {
                        "labels": entry["labels"],
                        "decision": entry["decision"],
                        "metrics": {name: value for name, value in entry["metrics"].items() if "latency" not in name},
                    }
                    for entry in state["rounds"]
                ],
                "final": {name: value for name, value in (state["final"] or {}).items() if name != "seconds"},
                "labels": labels,
                "artifacts": sorted(row.id for row in store.metadata.artifacts() if row.kind not in _TIMED),
            }

    def check_the_store(self) -> None:
        """Nothing is half-written, nothing is left over, and no finished work was done a second time."""
        home = self.folder / ".posttrain"
        with Workspace.open(self.folder, load_config(self.folder).store, write=False) as store:
            known = {row.id for row in store.metadata.artifacts()}
            assert set(store.artifacts.ids()) == known
            assert all(store.artifacts.verify(id) == [] for id in known)
            keys = [run.key for run in store.metadata.runs(status="done")]
            assert len(set(keys)) == len(keys)
            assert store.metadata.runs(status="running") == []
        assert [path for name in ("tmp", "scratch") for path in (home / name).iterdir()] == []
        assert (home / "champion" / "config.json").is_file()
        assert (self.folder / "report.html").stat().st_size > 0


@pytest.fixture
def demo(tmp_path: Path) -> Callable[[str], Demo]:
    return lambda name="demo": Demo(tmp_path / name)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of the command when nobody interrupts it, and its ``seconds``; one for all workers."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    said = run / "reference.json"
    with FileLock(run / "reference.lock"):
        if not said.exists():
            demo = Demo(run / "reference")
            command = Path(sys.executable).parent / "posttrain"
            done = subprocess.run(
                [command, "demo", "--quick", "--dir", demo.folder], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            demo.check_the_store()
            said.write_text(json.dumps({**demo.outcome(), "seconds": demo.seconds()}))
    found: dict[str, Any] = json.loads(said.read_text())
    return found
