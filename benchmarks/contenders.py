"""What benchmarks of trainers share: every contender is a process that prints a line of JSON a step."""

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WARM_UP = 2
"""Steps that are not counted."""

Step = dict[str, float]


@dataclass(frozen=True)
class Ran:
    """What a contender printed: its steps, and the seconds before the first, where it said so."""

    steps: list[Step]
    ahead: float | None


def run(command: Sequence[str]) -> Ran:
    """Run a contender to its end.

    Raises:
        SystemExit: it failed, with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])}: {done.stderr}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"loss"', '{"ahead"'))]
    ahead = next((line["ahead"] for line in lines if "ahead" in line), None)
    return Ran([line for line in lines if "loss" in line], ahead)


def print_table(found: Mapping[str, Ran], tokens: Sequence[int]) -> None:
    """Each contender's losses, and its median speed, that as a share of the first one's, and its peak memory.

    Args:
        tokens: of each step, without padding: the same for all.
    """
    for name, ran in found.items():
        print(name, [round(step["loss"], 4) for step in ran.steps])
    speeds = {
        name: statistics.median(
            count / step["seconds"] for count, step in list(zip(tokens, ran.steps, strict=True))[WARM_UP:]
        )
        for name, ran in found.items()
    }
    fastest = next(iter(speeds.values()))
    print("| contender | tokens/s | ours is faster by | seconds ahead of the first step | peak memory, GiB |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, ran in found.items():
        peak = max(step["bytes"] for step in ran.steps) / 2**30
        ahead = "" if ran.ahead is None else f"{ran.ahead:.0f}"
        print(f"| {name} | {speeds[name]:.0f} | {fastest / speeds[name]:.2f} | {ahead} | {peak:.1f} |")
