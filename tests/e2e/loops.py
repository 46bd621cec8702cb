"""Whole loops in processes of their own, which can be killed."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import pyarrow.parquet as parquet

from posttrain.inspect.status import status
from posttrain.loop.config import load_config
from posttrain.store.workspace import Workspace

_TIMING_KINDS = ("latency", "decision")


class Loop:
    """A command that runs the loop in a folder.

    Args:
        folder: the workspace.
        command: the arguments of ``posttrain``.
        prepare: fills the empty folder for the command.
    """

    def __init__(self, folder: Path, command: list[str], prepare: Callable[[Path], object]) -> None:
        self.folder, self.command, self.prepare = folder, command, prepare
        self.log = folder.with_suffix(".log")
        self.reset()

    def reset(self) -> None:
        """Empties the folder and prepares it again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.prepare(self.folder)

    def start(self) -> BaseProcess:
        return forked.start(self.command, self.folder.parent, self.log)

    def finish(self) -> None:
        process = self.start()
        process.join(300)
        assert process.exitcode == 0, self.log.read_text()

    def kill_after(self, seconds: float) -> bool:
        """Starts the command and kills it with ``kill -9`` after ``seconds``; False if it finished before."""
        return self._kill(self.start(), seconds)

    def kill_when(self, line: str) -> bool:
        """Starts the command and kills it as soon as its log has a line; False if it finished before."""
        process = self.start()
        while process.is_alive() and not (self.log.exists() and line in self.log.read_text().splitlines()):
            time.sleep(0.02)
        return self._kill(process, 0)

    def finishes_before_a_kill(self, seconds: float) -> bool:
        """Starts the command and kills it ``seconds`` after it took the lock; True if it finished before."""
        process = self.start()
        while process.is_alive() and not self._holds_lock(process.pid):
            time.sleep(0.02)
        return not self._kill(process, seconds)

    def _kill(self, process: BaseProcess, seconds: float) -> bool:
        process.join(seconds)
        process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL), self.log.read_text()
        return process.exitcode == -signal.SIGKILL

    def _holds_lock(self, pid: int | None) -> bool:
        try:
            return bool(json.loads((self.folder / ".posttrain" / "loop.lock.json").read_bytes())["pid"] == pid)
        except FileNotFoundError:
            return False

    def seconds(self) -> float:
        """The total duration of the rounds."""
        with Workspace.open(self.folder, load_config(self.folder).store, write=False) as store:
            return sum(entry.seconds or 0.0 for entry in store.metadata.rounds())

    def outcome(self) -> dict[str, Any]:
        """The results that two equal runs share: everything but times."""
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
                "artifacts": sorted(row.id for row in store.metadata.artifacts() if row.kind not in _TIMING_KINDS),
            }

    def check_store(self) -> None:
        """Checks that nothing is half-written or left over, and that no finished stage ran twice."""
        home = self.folder / ".posttrain"
        with Workspace.open(self.folder, load_config(self.folder).store, write=False) as store:
            artifact_ids = {row.id for row in store.metadata.artifacts()}
            assert set(store.artifacts.ids()) == artifact_ids
            assert all(store.artifacts.verify(id) == [] for id in artifact_ids)
            keys = [run.key for run in store.metadata.runs(status="done")]
            assert len(set(keys)) == len(keys)
            assert store.metadata.runs(status="running") == []
        assert [path for name in ("tmp", "scratch") for path in (home / name).iterdir()] == []
        assert (home / "champion" / "config.json").is_file()
