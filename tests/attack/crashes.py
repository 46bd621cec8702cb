"""Cuts the power at random moments of the store's work: nothing that was reported may be lost, and the work continues.

``python tests/attack/crashes.py [WORKLOAD ...] [--count 10000] [--seed 0]``

The work is done once and recorded (`file_layer`). Then, for each power cut, the files are written as the disk may have
them at a random moment of the record (`crash_states`), checked, and the same work is done again. Of four power cuts
one hits work that continues after a ``kill -9``, and one the recovery from an earlier power cut.
"""

import argparse
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash_states import PowerCut, State, promised, write_state
from crash_work import Log
from crash_workloads import WORKLOADS, check_done
from file_layer import Promise, Recorder, Sync, Trace

from posttrain.store.files import remove_tree

_FORKS = multiprocessing.get_context("fork")

MOMENTS = ("undisturbed work", "work after a kill", "undisturbed work", "a recovery")
"""What a power cut hits, in turn."""

SHARED_BY = 8
"""Power cuts of one record of work after a kill, or of a recovery."""

MEMORY = Path("/dev/shm")


@dataclass
class Result:
    """Power cuts by what they hit and by what was lost, and a line for each after which something was wrong."""

    operations: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.moments.total()

    def add(self, other: "Result") -> None:
        self.operations = max(self.operations, other.operations)
        self.moments += other.moments
        self.kinds += other.kinds
        self.findings += other.findings


def cut_power(name: str, folder: Path, count: int, seed: int = 0, shared_by: int = SHARED_BY) -> Result:
    """Cuts the power ``count`` times while a workload runs."""
    return Attack(name, folder, seed).run(count, shared_by)


class Attack:
    """Power cuts of one workload, in folders below ``folder``.

    Attributes:
        trace: The record of undisturbed work.
        kills: Moments of the next kills; random ones once it is empty.
    """

    def __init__(self, name: str, folder: Path, seed: int = 0) -> None:
        self._name, self._workload, self._folder = name, WORKLOADS[name], folder
        self._draw = random.Random(f"{name}/{seed}")
        self.result = Result()
        root = self._new_folder()
        self._workload.prepare(root)
        self._template = self._folder / "template"
        shutil.copytree(root, self._template, symlinks=True)
        recorder = Recorder(root)
        with recorder.recording():
            self._expected = self._workload.run(root, Log(recorder.promise))
        remove_tree(root)
        self.trace = recorder.trace
        self.result.operations = len(recorder.trace.operations)
        # First before each sync of a folder, when names are seen by the next process that are not on the disk.
        self.kills = [
            number
            for number, operation in enumerate(self.trace.operations)
            if isinstance(operation, Sync) and self.trace.inodes[operation.inode].kind == "folder"
        ]
        self._draw.shuffle(self.kills)

    def run(self, count: int, shared_by: int) -> Result:
        """Cuts the power ``count`` times, up to ``shared_by`` times in one record."""
        moments = itertools.cycle(MOMENTS)
        while self.result.count < count:
            moment = next(moments)
            trace, promises, start = self.trace, [], 0
            if moment == "work after a kill":
                trace, start = self._after_kill()
            elif moment == "a recovery":
                trace, promises = self._recovery()
            for _ in range(min(shared_by, count - self.result.count)):
                point = self._draw.randint(start, len(trace.operations))
                self._cut(trace, point, PowerCut(trace, point).draw(self._draw), moment, promises)
        return self.result

    def cut_after_promises(self) -> Result:
        """Cuts the power after each promise, and loses everything that may be lost."""
        self._cut_at_worst(self.trace, 0, MOMENTS[0])
        return self.result

    def cut_after_kills(self) -> Result:
        """Kills the work at each of `kills`, does it again, and cuts the power as `cut_after_promises`."""
        for _ in range(len(self.kills)):
            self._cut_at_worst(*self._after_kill(), MOMENTS[1])
        return self.result

    def _cut_at_worst(self, trace: Trace, start: int, moment: str) -> None:
        for point in range(start, len(trace.operations)):
            if isinstance(trace.operations[point], Promise):
                self._cut(trace, point + 1, PowerCut(trace, point + 1).worst(), moment)

    def _cut(self, trace: Trace, point: int, state: State, moment: str, earlier: Sequence[Promise] = ()) -> None:
        root = self._new_folder()
        write_state(trace, state, root)
        where = f"{self._name}, {moment}, operation {point} of {len(trace.operations)}, {sorted(state.kinds)}"
        problems = list(self._problems(root, [*earlier, *state.promises]))
        self.result.moments[moment] += 1
        self.result.kinds.update(state.kinds or {"nothing lost"})
        if problems:
            last = trace.operations[max(0, point - 3) : point]
            self.result.findings.append(f"{where}: {'; '.join(problems)} <- {_shorten(last)}")
        remove_tree(root)

    def _problems(self, root: Path, promises: Sequence[Promise]) -> Iterator[str]:
        try:
            yield from self._workload.check(root, promises)
            log = Log()
            outcome = self._workload.run(root, log)
            if outcome != self._expected:
                yield f"{outcome} instead of {self._expected}"
            for name in set(promised(promises, "done")) & set(log.executed):
                yield f"{name} was done again"
            if (root / "work" / ".posttrain" / "format.json").exists():
                yield from check_done(root)
        except Exception as error:  # noqa: BLE001 - any error is a finding
            yield f"{type(error).__name__}: {error}"

    def _after_kill(self) -> tuple[Trace, int]:
        """Records work that is killed, and done again; returns the number of operations before the kill."""
        root, file = self._new_folder(), self._folder / "killed"
        shutil.copytree(self._template, root, symlinks=True, dirs_exist_ok=True)
        recorder = Recorder(root)
        recorder.kill_at(self.kills.pop() if self.kills else self._draw.randrange(self.result.operations), file)
        process = _FORKS.Process(target=self._run_recorded, args=(recorder, root))
        process.start()
        process.join(60)
        assert process.exitcode == 0, process.exitcode
        recorder = Recorder(root)
        recorder.resume(file)
        start = len(recorder.trace.operations)
        with recorder.recording():
            self._workload.run(root, Log(recorder.promise))
        remove_tree(root)
        return recorder.trace, start

    def _recovery(self) -> tuple[Trace, list[Promise]]:
        """Records the work after a power cut."""
        state = PowerCut(self.trace, self._draw.randint(0, len(self.trace.operations))).draw(self._draw)
        root = self._new_folder()
        write_state(self.trace, state, root)
        recorder = Recorder(root)
        try:
            with recorder.recording():
                self._workload.run(root, Log(recorder.promise))
        except Exception as error:  # noqa: BLE001
            self.result.findings.append(f"{self._name}, recovery: {type(error).__name__}: {error}")
        remove_tree(root)
        return recorder.trace, list(state.promises)

    def _run_recorded(self, recorder: Recorder, root: Path) -> None:
        with recorder.recording():
            self._workload.run(root, Log(recorder.promise))
            recorder.end()

    def _new_folder(self) -> Path:
        folder = self._folder / "disk"
        folder.mkdir()
        return folder


def _shorten(operations: Sequence[Any]) -> str:
    return ", ".join(f"{text[:90]}..." if len(text := repr(operation)) > 93 else text for operation in operations)


def _work(task: tuple[str, int, int]) -> tuple[str, Result]:
    name, count, seed = task
    parent = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="posttrain-crashes-", dir=parent) as folder:
        return name, cut_power(name, Path(folder), count, seed)


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help="all by default")
    parser.add_argument("--count", type=int, default=1000, help="power cuts of all workloads together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    logging.getLogger("posttrain").setLevel(logging.CRITICAL)
    names = arguments.workloads or list(WORKLOADS)
    share = -(-arguments.count // (2 * len(names)))
    tasks = [(name, share, 2 * arguments.seed + half) for half in range(2) for name in names]
    start = time.monotonic()
    results: dict[str, Result] = {name: Result() for name in names}
    with ProcessPoolExecutor(arguments.processes, _FORKS) as pool:
        for name, result in pool.map(_work, tasks):
            results[name].add(result)
    for name, result in results.items():
        counts = (
            ", ".join(f"{name} {number:,}" for name, number in counter.most_common())
            for counter in (result.moments, result.kinds)
        )
        print(f"{name}: {result.count:,} power cuts ({'; '.join(counts)}), {len(result.findings)} findings")
    findings = [finding for result in results.values() for finding in result.findings]
    total = sum(result.count for result in results.values())
    print(f"{total:,} power cuts, {len(findings)} findings, {time.monotonic() - start:.0f} s")
    for finding in findings[:40]:
        print(f"FINDING: {finding}")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(run())
