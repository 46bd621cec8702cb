"""Runs two trainers in step, each in a process of its own, for the benchmarks that compare trainers.

A contender is a process that waits for a line on its standard input before each step, and prints a line of JSON after
it, with ``loss``, ``tokens`` (without padding), ``seconds`` and ``bytes`` (its peak memory); ours prints ``mfu`` too.
It may print ``{"ahead": seconds}``, the time it took to get ready.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WARM_UP = 2
"""The number of first steps that are left out of the medians."""

Step = dict[str, float]


@dataclass
class ContenderRun:
    """The steps that a contender printed, and the seconds that it took to get ready."""

    steps: list[Step] = field(default_factory=list)
    ahead: float | None = None

    @property
    def speed(self) -> float:
        """Return the tokens a second of the median step."""
        return statistics.median(step["tokens"] / step["seconds"] for step in self.steps[WARM_UP:])


class StepOnRequestSink:
    """Prints each step as JSON, and blocks training until a line on the standard input requests the next step.

    The time from its creation to the start of the first step is reported as ``ahead``.
    """

    def __init__(self) -> None:
        self._start: float | None = time.perf_counter()

    def write(self, values: Any, decisions: Any) -> None:
        if self._start is not None:
            print(json.dumps({"ahead": time.perf_counter() - self._start - values.seconds}))
            self._start = None
        names = {"loss", "tokens", "seconds", "mfu"}
        row = {name: value for name, value in asdict(values).items() if name in names}
        print(json.dumps(row | {"bytes": values.memory_bytes}), flush=True)
        sys.stdin.readline()

    def rewind(self, steps: Any, reported: Any) -> None: ...

    def close(self) -> None: ...


def run_in_turn(command: Sequence[str], peer_command: Sequence[str]) -> tuple[ContenderRun, ContenderRun]:
    """Run two contenders, a step of each in turn, so that both see the same changes in the machine's speed.

    Raises:
        SystemExit: one failed; the message holds its standard error.
    """
    runs = ContenderRun(), ContenderRun()
    contenders = [_Contender(command, runs[0]), _Contender(peer_command, runs[1])]
    while contenders:
        contenders = [contender for contender in contenders if contender.step()]
    return runs


def compare(command: Sequence[str], peer_commands: Mapping[str, Sequence[str]]) -> None:
    """Print a table of ours against each peer, and the losses of all."""
    table = []
    for name, peer_command in peer_commands.items():
        ours, peer = run_in_turn(command, peer_command)
        for label, run in (("ours", ours), (name, peer)):
            print(label, [round(step["loss"], 4) for step in run.steps], flush=True)
        differences = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours.steps, peer.steps, strict=True) if b["loss"]]
        peaks = [max(step["bytes"] for step in run.steps) / 2**30 for run in (ours, peer)]
        # With few tokens of each example none may be supervised, and all losses are 0.
        apart = f"{statistics.mean(differences):.2%} | {max(differences):.2%}" if differences else " | "
        ahead = ["" if run.ahead is None else f"{run.ahead:.0f}" for run in (ours, peer)]
        table.append(
            f"| {name} | {peer.speed:.0f} | {ours.speed:.0f} | {ours.speed / peer.speed:.2f} | {peaks[1]:.1f} | "
            f"{peaks[0]:.1f} | {ahead[1]} | {ahead[0]} | {apart} |"
        )
        if mfus := [step["mfu"] for step in ours.steps[WARM_UP:] if step.get("mfu")]:
            print(f"ours, FLOPs as a share of the measured peak: {statistics.median(mfus):.2f}")
    print("| against | tokens/s | ours | faster by | GiB | ours | ahead, s | ours | losses apart, mean | most |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(table))


class _Contender:
    def __init__(self, command: Sequence[str], run: ContenderRun) -> None:
        self._command, self._run = command, run
        self._process: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - it lasts as long as the process

    def step(self) -> bool:
        """Train a step.

        Returns:
            True if it trained one, False if it has finished.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write("\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended; reading its output below shows how
        for line in process.stdout:
            if line.startswith('{"ahead"'):
                self._run.ahead = json.loads(line)["ahead"]
            elif line.startswith('{"loss"'):
                self._run.steps.append(json.loads(line))
                return True
        if process.wait():
            self._stderr.seek(0)
            raise SystemExit(f"{' '.join(self._command[:3])}: {self._stderr.read()}")
        return False
