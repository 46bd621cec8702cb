"""The workspace's own record of a training: one line of JSON a step."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.store.files import make_folder, writing
from posttrain.train.watch.findings import Decision
from posttrain.train.watch.values import StepValues

log = logging.getLogger("posttrain")


class JsonLines:
    """Appends to a file and flushes after each line, so that a kill costs the line being written at most.

    Args:
        path: the file; made if missing.

    What cannot be read, such as the half line that a kill leaves, is removed with all that follows, and named; `rewind`
    writes again what still counts of that.

    Raises:
        UserError: the disk refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_folder(path.parent)
        with writing(path):
            self._file = path.open("ab")
        self._cut()

    def write(self, values: StepValues, decisions: Sequence[Decision]) -> None:
        """One line: the values by name, and ``decisions`` where there are any."""
        line = values.to_json()
        if decisions:
            line["decisions"] = [decision.to_json() for decision in decisions]
        with writing(self._path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def rewind(self, steps: Sequence[StepValues], told: Mapping[int, Sequence[Decision]]) -> None:
        kept = self._cut(len(steps))
        if missing := steps[kept:]:
            log.warning("%s: the lines of %d steps from %d on are written again", self._path, len(missing), kept)
        for values in missing:
            self.write(values, told.get(values.step, ()))

    def close(self) -> None:
        with writing(self._path):
            self._file.close()

    def _cut(self, steps: int | None = None) -> int:
        """Keep the lines of the first ``steps``, or all, up to one that is missing; returns how many these are."""
        kept = size = 0
        for end, line in _lines(self._path):
            if line is None:
                log.warning("%s: what follows byte %d cannot be read and is removed", self._path, size)
            if line is None or (steps is not None and (kept == steps or line["step"] != kept)):
                break
            kept, size = kept + 1, end
        with writing(self._path):
            self._file.truncate(size)
        return kept


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines that `JsonLines` wrote, up to the first that cannot be read."""
    found = []
    for _, line in _lines(path):
        if line is None:
            break
        found.append(line)
    return found


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each line's end in bytes and its values; None for one that cannot be read."""
    end = 0
    with path.open("rb") as file:
        for raw in file:
            end += len(raw)
            yield end, _parsed(raw)


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    whole = raw.endswith(b"\n") and isinstance(line, dict) and isinstance(line.get("step"), int)
    return line if whole else None
