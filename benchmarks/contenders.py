"""What benchmarks of trainers share: contenders are processes that train a step when they are told to.

A contender waits for a line on its standard input before each step, and prints a line of JSON after it, with ``loss``,
``tokens`` (without padding), ``seconds`` and ``bytes`` (its peak memory); ours has ``mfu`` too. It may print
``{"ahead": seconds}`` that it took to get ready.
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
"""Steps that are not counted."""

Step = dict[str, float]


@dataclass
class Ran:
    """What a contender printed."""

    steps: list[Step] = field(default_factory=list)
    ahead: float | None = None

    @property
    def speed(self) -> float:
        """Tokens a second of the median step."""
        return statistics.median(step["tokens"] / step["seconds"] for step in self.steps[WARM_UP:])


class OnDemand:
    """A sink of ours that prints each step, and holds training up until the next one is asked for.

    What passes from its making to the first step is what ours needs to get ready.
    """

    def __init__(self) -> None:
        self._start: float | None = time.perf_counter()

    def write(self, values: Any, decisions: Any) -> None:
        if self._start is not None:
            print(json.dumps({"ahead": time.perf_counter() - self._start - values.seconds}))
            self._start = None
        wanted = {"loss", "tokens", "seconds", "mfu"}
        found = {name: value for name, value in asdict(values).items() if name in wanted}
        print(json.dumps(found | {"bytes": values.memory_bytes}), flush=True)
        sys.stdin.readline()

    def rewind(self, steps: Any, told: Any) -> None: ...

    def close(self) -> None: ...


def side_by_side(one: Sequence[str], other: Sequence[str]) -> tuple[Ran, Ran]:
    """Two contenders, a step of each in turn, so that both meet the same moods of the machine.

    Raises:
        SystemExit: one failed, with what it said.
    """
    found = Ran(), Ran()
    running = [_Contender(one, found[0]), _Contender(other, found[1])]
    while running:
        running = [contender for contender in running if contender.step()]
    return found


def compare(ours: Sequence[str], others: Mapping[str, Sequence[str]]) -> None:
    """Print a table of ours against each of the others, and the losses of all."""
    table = []
    for name, command in others.items():
        mine, theirs = side_by_side(ours, command)
        for who, ran in (("ours", mine), (name, theirs)):
            print(who, [round(step["loss"], 4) for step in ran.steps], flush=True)
        apart = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(mine.steps, theirs.steps, strict=True) if b["loss"]]
        peaks = [max(step["bytes"] for step in ran.steps) / 2**30 for ran in (mine, theirs)]
        ahead = ["" if ran.ahead is None else f"{ran.ahead:.0f}" for ran in (mine, theirs)]
        table.append(
            f"| {name} | {theirs.speed:.0f} | {mine.speed:.0f} | {mine.speed / theirs.speed:.2f} | {peaks[1]:.1f} | "
            f"{peaks[0]:.1f} | {ahead[1]} | {ahead[0]} | {statistics.mean(apart):.2%} | {max(apart):.2%} |"
        )
        if shares := [step["mfu"] for step in mine.steps[WARM_UP:] if step.get("mfu")]:
            print(f"ours, FLOPs as a share of the measured peak: {statistics.median(shares):.2f}")
    print("| against | tokens/s | ours | faster by | GiB | ours | ahead, s | ours | losses apart, mean | most |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(table))


class _Contender:
    def __init__(self, command: Sequence[str], ran: Ran) -> None:
        self._command, self._ran = command, ran
        self._process: subprocess.Popen[str] | None = None
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - it lasts as long as the process

    def step(self) -> bool:
        """Have it train a step.

        Returns:
            Whether it did; else it has come to its end.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write("\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # its end shows below
        for line in process.stdout:
            if line.startswith('{"ahead"'):
                self._ran.ahead = json.loads(line)["ahead"]
            elif line.startswith('{"loss"'):
                self._ran.steps.append(json.loads(line))
                return True
        if process.wait():
            self._said.seek(0)
            raise SystemExit(f"{' '.join(self._command[:3])}: {self._said.read()}")
        return False
