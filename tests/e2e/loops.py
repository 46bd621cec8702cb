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

_TIMED = ("latency", "decision")


class Loop:
    """A command that turns the loop in a folder.

    Args:
        folder: the workspace.
        command: what comes behind ``posttrain``.
        prepare: makes of an empty folder what the command wants.
    """

    def __init__(self, folder: Path, command: list[str], prepare: Callable[[Path], object]) -> None:
        self.folder, self.command, self.prepare = folder, command, prepare
        self.log = folder.with_suffix(".log")
        self.afresh()

    def afresh(self) -> None:
        """As if the command had never been called."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.prepare(self.folder)

    def start(self) -> BaseProcess:
        return forked.start(self.command, self.folder.parent, self.log)

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
