"""Finished studies and the tasks that they were about: kept in ``task.json``, and read to begin other studies with."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically
from posttrain.tune.events import Event
from posttrain.tune.goal import Goal
from posttrain.tune.losses import comparable_values
from posttrain.tune.space import Space
from posttrain.tune.storage import STUDY_FILE
from posttrain.tune.study import TRIALS_FILE, read_study_events
from posttrain.tune.trial import Report, Trial, TrialState, rank

log = logging.getLogger("posttrain")

TASK_FILE = "task.json"
"""File in a study's folder with its goal and the features of its task."""

Features = Mapping[str, float]
"""Numbers about what a study tunes, by name, by which studies are compared; sizes as their decimal logarithm."""

_UNIT = 0.5
"""Least scale of a feature: a factor of three in size is about one unit."""


@dataclass(frozen=True)
class PastStudy:
    """A study that another one may learn from.

    Attributes:
        name: for messages.
        goal: what it searched.
        features: of its task.
        trials: its trials, by number.
    """

    name: str
    goal: Goal
    features: Features
    trials: tuple[Trial, ...]

    @classmethod
    def read(cls, folder: Path, name: str | None = None) -> Self:
        """Reads a study from a folder with ``task.json`` and ``trials.jsonl``.

        Raises:
            UserError: the folder holds no study, or one of its files is damaged.
        """
        name = name or folder.resolve().name
        try:
            content = json.loads((folder / TASK_FILE).read_bytes())
            lines = (folder / TRIALS_FILE).read_text(encoding="utf-8").splitlines()
            return cls.from_json({**content, "name": name, "trials": [json.loads(line) for line in lines]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"is not a study that can be read ({error})", where=str(folder), fix="leave it out"
            ) from None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Returns the study that `to_json` was called on."""
        goal = Goal.from_json(content["goal"])
        trials = tuple(_read_trial(line, goal.space) for line in content["trials"])
        return cls(content["name"], goal, content["features"], trials)

    def to_json(self) -> dict[str, Any]:
        """Returns the study as JSON values."""
        trials = [trial.to_json() for trial in self.trials]
        return {"name": self.name, "goal": self.goal.to_json(), "features": dict(self.features), "trials": trials}

    @property
    def ranked(self) -> list[Trial]:
        """Trials that have a value, the best first."""
        valued = [trial for trial in self.trials if trial.latest is not None]
        return sorted(valued, key=lambda trial: rank(trial, self.goal.maximize))

    def losses(self) -> dict[int, float]:
        """Returns the values that can be compared, with the sign that makes less better, by number of their trial."""
        sign = -1.0 if self.goal.maximize else 1.0
        values = comparable_values(self.goal.space, self.trials).values
        return {number: sign * value for number, value in sorted(values.items())}


def read_kept_study(
    folder: Path, url: str | None = None, name: str = "tune"
) -> tuple[Goal, Sequence[Trial], Sequence[Event]]:
    """Reads a study with its events; one whose database is gone, as a round's search, from its files, without events.

    Raises:
        UserError: there is no such study.
    """
    if url is None and not (folder / STUDY_FILE).is_file() and (folder / TASK_FILE).is_file():
        study = PastStudy.read(folder)
        return study.goal, study.trials, ()
    return read_study_events(folder, url, name)


def write_task(folder: Path, goal: Goal, features: Features) -> None:
    """Writes ``task.json``, by which later studies find this one."""
    # What else decides the values may name a path, which must not differ between a round's artifacts.
    content = {"goal": replace(goal, identity={}).to_json(), "features": dict(features)}
    text = json.dumps(content, ensure_ascii=False, indent=1)
    write_atomically(folder / TASK_FILE, text.encode())


def read_past(values: Any, root: Path, where: str = "warm_start", exclude: Path | None = None) -> list[PastStudy]:
    """Reads the studies that a new one may start from.

    Args:
        values: a folder of studies, a study's folder, or a list of these.
        root: folder that paths are relative to.
        where: the key, named in errors.
        exclude: folder of the new study, which may lie beside the others.

    Raises:
        UserError: there is no such folder, or it holds no study.
    """
    studies: dict[Path, PastStudy] = {}
    own = None if exclude is None else exclude.resolve()
    for value in [values] if isinstance(values, str | Path) else values:
        folder = (root / Path(value).expanduser()).resolve()
        # The first study of a series has none before it.
        may_be_empty = own is not None and folder in own.parents
        if not folder.is_dir() and not may_be_empty:
            raise UserError(
                f"no such folder: {value}", where=where, fix="name a study's folder, or a folder of studies"
            )
        if (folder / TASK_FILE).is_file():
            studies[folder] = PastStudy.read(folder)
            continue
        inner = sorted(file.parent for file in folder.glob(f"*/{TASK_FILE}"))
        if not inner and not may_be_empty:
            raise UserError(f"{value} holds no study", where=where, fix="name the folder that posttrain tune wrote")
        for path in inner:
            if path != own:
                try:
                    studies[path] = PastStudy.read(path)
                except UserError as error:  # one of many
                    log.warning("  left out: %s", error)
    studies.pop(own or Path(), None)
    return list(studies.values())


def distances(features: Features, past: Sequence[PastStudy]) -> list[float | None]:
    """Returns how far the tasks of studies are; None where nothing can be compared.

    That is the root mean square of the differences of the features that both have, each divided by its deviation over
    the studies, which counts at least half a unit.
    """
    scales = {}
    for name in features:
        values = [study.features[name] for study in past if name in study.features]
        scales[name] = max(float(np.std(values)) if values else 0.0, _UNIT)
    result: list[float | None] = []
    for study in past:
        other = study.features
        terms = [(features[name] - other[name]) / scales[name] for name in features if name in other]
        result.append(math.sqrt(sum(term**2 for term in terms) / len(terms)) if terms else None)
    return result


def _read_trial(line: Mapping[str, Any], space: Space) -> Trial:
    """Reads a line of ``trials.jsonl``; a round's have no seconds, as these differ from run to run."""
    settings, values = line["settings"], line.get("values") or ()
    return Trial(
        line["number"],
        settings,
        {name: settings[name] for name in space.parameters if name in settings},
        TrialState(line["state"]),
        tuple(_read_report(*report) for report in line["reports"]),
        line["value"],
        seconds=line.get("seconds", 0.0),
        tokens=line.get("tokens", 0),
        others=tuple(values[1:]),
    )


def _read_report(step: int, value: float, seconds: float = 0.0, tokens: int = 0, *others: float) -> Report:
    return Report(step, value, seconds, tokens, others)
