"""The trials of a search: their scores, how two are compared on the same records, and the file that keeps them."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors
from posttrain.store.hashing import encode_line, read_lines

Scores = list[list[float]]
"""For each suite the scores of its records that were read so far, in an order that is the same in all trials."""


@dataclass(frozen=True)
class Trial:
    """One merge that was measured.

    Attributes:
        number: from 0.
        values: the numbers, by variable.
        scores: of the records that were read, by suite.
        stopped: read in part, as it cannot be better than the best.
        score: mean over the suites of their mean scores; of a stopped trial the best's score plus the mean difference
            on the records that both have.
        variance: of ``score`` as an estimate of that of all records; 0 where all were read.
    """

    number: int
    values: dict[str, float]
    scores: Scores
    stopped: bool
    score: float
    variance: float


def mean_score(scores: Scores) -> float:
    """Returns the mean over the suites of their mean scores."""
    return math.fsum(math.fsum(suite) / len(suite) for suite in scores) / len(scores)


def paired_difference(scores: Scores, best: Scores, sizes: Sequence[int]) -> tuple[float, float]:
    """Returns the mean difference to the best on the records read so far, and the variance of that mean.

    Both are means over the suites; a suite of which nothing was read yet is left out.

    Args:
        scores: of the trial.
        best: of the best trial, all records.
        sizes: number of records of each suite.
    """
    means, variances = [], []
    for own, other, size in zip(scores, best, sizes, strict=True):
        if own:
            differences = np.array(own) - np.array(other[: len(own)])
            means.append(differences.mean())
            spread = differences.var(ddof=1) if len(own) > 1 else 1.0
            variances.append(spread / len(own) * (1 - len(own) / size))
    return float(np.mean(means)), float(np.sum(variances)) / len(means) ** 2


class TrialJournal:
    """The file of finished trials: a line for the search's settings, then one a trial, each with a checksum."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self._path, self._trials, self._header = path, list[Trial](), header
        if path is None:
            return
        with disk_errors(path):
            raw = path.read_bytes() if path.exists() else b""
        lines = read_lines(raw)
        if lines.damaged:
            raise UserError(f"line {lines.damaged[0]} is damaged", where=str(path), fix="remove the file")
        if lines.values and lines.values[0] != header:
            raise UserError(
                "holds the trials of another search", where=str(path), fix="remove it, or write to another --out"
            )
        self._trials = [Trial(**value) for value in lines.values[1:]]
        if len(raw) > lines.whole:
            with disk_errors(path):
                os.truncate(path, lines.whole)  # a line that a kill cut off

    def trial(self, number: int, values: Mapping[str, float]) -> Trial | None:
        """Returns the trial that was finished under this number.

        Raises:
            UserError: it had other numbers, as another version of a library proposes others.
        """
        if number >= len(self._trials):
            return None
        if self._trials[number].values != values:
            raise UserError(f"trial {number} had other numbers", where=str(self._path), fix="remove the file")
        return self._trials[number]

    def append(self, trial: Trial) -> None:
        """Writes a finished trial, synced; before the first one the settings, so that a mistake leaves no file."""
        if self._path is None:
            return
        lines = encode_line(asdict(trial))
        if not trial.number:
            lines = encode_line(self._header) + lines
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab" if trial.number else "wb") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
