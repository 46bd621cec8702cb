"""``steps.jsonl``: what each step measured, one line a step, in a file that grows from checkpoint to checkpoint."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.train.checkpoint.manifest import STEPS, checksum
from posttrain.train.watch.values import StepValues


@dataclass(frozen=True)
class StepsFile:
    """What this process wrote into an earlier checkpoint's folder, and its checksum."""

    folder: Path
    steps: Sequence[StepValues]
    checksum: str


def write_steps(folder: Path, steps: Sequence[StepValues], earlier: StepsFile | None) -> bytes:
    """Write the steps into a fresh folder: a second name of the earlier file, with the lines that it does not have yet.

    What another checkpoint's manifest covers is never touched: a kill leaves behind it, at most, lines that nobody
    reads.

    Returns:
        The lines of all steps.

    Raises:
        OSError: the disk refused.
    """
    path = folder / STEPS
    known, count = _shared(path, steps, earlier)
    added = _lines(steps[count:])
    append(path, added)
    return known + added


def append(path: Path, lines: bytes) -> None:
    """Add to the end of a file; make it if it is missing."""
    with path.open("ab") as file:
        file.write(lines)


def read_lines(content: bytes) -> list[StepValues]:
    """The reverse of what `write_steps` writes."""
    return [StepValues.from_json(json.loads(line)) for line in content.splitlines()]


def _shared(path: Path, steps: Sequence[StepValues], earlier: StepsFile | None) -> tuple[bytes, int]:
    """Give the earlier file a second name; returns its content and how many of the steps stand in it.

    Nothing and 0 where it was removed, holds other steps, or the file system has no second names: all is written anew.
    """
    if earlier is None or steps[: len(earlier.steps)] != earlier.steps:
        return b"", 0
    with suppress(OSError):
        os.link(earlier.folder / STEPS, path)
        content = path.read_bytes()
        if checksum(content) == earlier.checksum:
            return content, len(earlier.steps)
    path.unlink(missing_ok=True)
    return b"", 0


def _lines(steps: Sequence[StepValues]) -> bytes:
    return b"".join(json.dumps(step.to_json(), allow_nan=False).encode() + b"\n" for step in steps)
