"""Begins a study with what earlier ones have learned: their best settings, and what a model of ranks expects."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.store.files import write_atomically
from posttrain.store.message import counted
from posttrain.tune.gaussian_process import encode
from posttrain.tune.goal import Goal
from posttrain.tune.parameters import Float, Int
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.samplers.initial import InitialPoints
from posttrain.tune.space import Settings, Space, point_key
from posttrain.tune.transfer.past import Features, PastStudy, distances
from posttrain.tune.trial import Trial

log = logging.getLogger("posttrain")

WARM_START_FILE = "warm_start.json"
"""The studies that one began with, in its folder: a resumed study continues with the same."""

NEAR = 2.0
"""The distance up to which a study counts as near."""

_SOURCES = 5  # of the near studies, the nearest

_POINTS, _PREDICTED = 3, 2  # settings of near studies, and then settings that the forest suggests

_LEAST_BUDGET = 10  # trials, below which the forest suggests nothing

_CANDIDATES, _TREES, _LEAST_ROWS = 500, 100, 10

_APART = 0.1  # least distance of what the forest suggests from other first points, a coordinate


@dataclass(frozen=True)
class WarmStart:
    """Earlier studies and settings that a study starts with.

    Attributes:
        sources: near studies, the nearest first.
        points: settings to try first.
        sentences: how both were chosen, and what was left out.
    """

    sources: tuple[PastStudy, ...]
    points: tuple[Settings, ...]
    sentences: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the content of ``warm_start.json``."""
        sources = [source.to_json() for source in self.sources]
        return {"sentences": list(self.sentences), "points": [*map(dict, self.points)], "sources": sources}


def choose_warm_start(
    past: Sequence[PastStudy], goal: Goal, features: Features, defaults: Mapping[str, Any] | None = None
) -> WarmStart:
    """Chooses the studies and the settings that a new study starts with.

    These are the best settings of the nearest studies, by turns. Studies whose features cannot be compared count as
    near, after the others. Where none is near, the study starts from its defaults.

    Args:
        past: finished studies.
        goal: what the new one searches.
        features: of its task.
        defaults: values of parameters that a study may lack; the middle of their range where there are none.
    """
    usable, sentences = [], []
    for study in past:
        if reason := _unusable(study, goal):
            sentences.append(f"{study.name} is left out: {reason}")
        else:
            usable.append(study)
    # Of two at the same distance the later one: a loop's last round.
    order = sorted(enumerate(distances(features, usable)), key=lambda item: (item[1] is None, item[1] or 0.0, -item[0]))
    near = [(usable[index], far) for index, far in order if far is None or far <= NEAR][:_SOURCES]
    if not near:
        if order and order[0][1] is not None:
            index, far = order[0][0], order[0][1]
            sentences.append(
                f"no earlier study is near: {usable[index].name} is at {far:.2g}, and near is up to {NEAR:g}"
            )
        return WarmStart((), (), (*sentences, "starts from the defaults"))
    points: dict[str, Settings] = {}
    for turn in range(_POINTS):
        for study, _ in near:
            ranked = study.ranked
            drawn = carry_over(ranked[turn].settings, goal.space, defaults) if turn < len(ranked) else None
            if drawn is not None and len(points) < _POINTS:
                points.setdefault(point_key(drawn), drawn)
    listed = ", ".join(
        f"{study.name} ({'not comparable' if far is None else f'distance {far:.2g}'}, "
        f"{counted(len(study.trials), 'trial')})"
        for study, far in near
    )
    sentences.insert(0, f"starts from {len(points)} settings of {listed}")
    sentences += [text for study, _ in near if (text := _differences(study, goal.space))]
    return WarmStart(tuple(study for study, _ in near), tuple(points.values()), tuple(sentences))


@dataclass(frozen=True)
class Transfer:
    """Earlier studies that a study may start from, and what is known of its own task.

    Args:
        past: finished studies.
        features: returns those of the task.
        defaults: values of parameters that an earlier study may lack.
    """

    past: Sequence[PastStudy] = ()
    features: Callable[[], Features] = dict
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def open(self, goal: Goal, folder: Path | None, trials: Sequence[Trial]) -> WarmStart:
        """Returns what the study in a folder started with; where it has not begun so, chooses it and keeps it there.

        Args:
            goal: of the study.
            folder: of the study; None keeps nothing.
            trials: that the study has already.
        """
        file = None if folder is None else folder / WARM_START_FILE
        if file is not None and file.is_file():
            return read_warm_start(file)
        if not self.past:
            return WarmStart((), (), ())
        warm_start = choose_warm_start(self.past, goal, self.features(), self.defaults)
        if trials:
            log.warning("  the study has begun without earlier ones: their settings are not tried first")
        for sentence in warm_start.sentences:
            log.info("  %s", sentence)
        if file is not None:
            write_atomically(file, json.dumps(warm_start.to_json(), ensure_ascii=False).encode())
        return warm_start


NO_TRANSFER = Transfer()


def read_warm_start(file: Path) -> WarmStart:
    """Reads ``warm_start.json``."""
    content = json.loads(file.read_bytes())
    sources = tuple(PastStudy.from_json(source) for source in content["sources"])
    return WarmStart(sources, tuple(content["points"]), tuple(content["sentences"]))


def warm_start_sentences(folder: Path) -> tuple[str, ...]:
    """Returns how the study in a folder was started; empty where it started from none."""
    file = folder / WARM_START_FILE
    return read_warm_start(file).sentences if file.is_file() else ()


def carry_over(settings: Settings, space: Space, defaults: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Returns another study's settings as a point of a space; None where they do not meet its constraints.

    Numbers outside of their range are moved to its end. A parameter without a usable value gets its default.
    """
    drawn: dict[str, Any] = {}
    for name, parameter in space.parameters.items():
        if not space.exists(name, drawn):
            continue
        values = [source[name] for source in (settings, defaults or {}) if name in source]
        candidates = [value if value in parameter else _moved(parameter, value) for value in values]
        middle = parameter.from_unit(0.5)
        drawn[name] = next((value for value in candidates if value is not None and value in parameter), middle)
    return drawn if space.is_feasible(space.complete(drawn)) else None


class FirstPoints(InitialPoints):
    """Proposes points, then settings whose rank a random forest predicts to be best, then what a sampler proposes.

    The forest learns from the trials of all sources: features of the task and settings, to the trial's rank within its
    study, from 0 for the best to 1.

    Args:
        sampler: proposes settings after these.
        points: settings to try first.
        sources: the studies; without any the forest suggests nothing.
        transfer: this study's task, and the defaults of parameters that a source may lack.
        budget: Trials that the study may start; None: any number.
    """

    def __init__(
        self,
        sampler: Sampler,
        points: Sequence[Settings],
        sources: Sequence[PastStudy] = (),
        transfer: Transfer = NO_TRANSFER,
        budget: int | None = None,
    ) -> None:
        super().__init__(sampler, points)
        self._sources, self._transfer = sources, transfer
        self._predicted = _PREDICTED if sources and (budget is None or budget >= _LEAST_BUDGET) else 0

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        started = len(self._points) <= number < len(self._points) + self._predicted
        if started and self._next_point(trials) is None:
            suggested = self._suggest(trials, self.generator(number))
            if suggested is not None:
                return Proposal(suggested)
        return super().propose(number, trials)

    def _suggest(self, trials: Sequence[Trial], generator: np.random.Generator) -> Settings | None:
        """Returns the settings with the least predicted rank that differ from what was tried; None without a model."""
        from sklearn.ensemble import RandomForestRegressor

        own = self._transfer.features()
        names = [name for name in own if all(name in study.features for study in self._sources)]
        rows, ranks = [], []
        for study in self._sources:
            losses = study.losses()
            order = sorted(losses, key=lambda number: (losses[number], number))
            for position, number in enumerate(order):
                drawn = carry_over(study.trials[number].settings, self.space, self._transfer.defaults)
                if drawn is not None and len(order) > 1:
                    features = [study.features[name] for name in names]
                    rows.append([*features, *encode(self.space, drawn)])
                    ranks.append(position / (len(order) - 1))
        if len(rows) < _LEAST_ROWS:
            return None
        forest = RandomForestRegressor(_TREES, random_state=int(generator.integers(2**31)))
        forest.fit(np.array(rows), np.array(ranks))
        candidates = [self.space.draw(generator) for _ in range(_CANDIDATES)]
        points = np.array([encode(self.space, drawn) for drawn in candidates])
        known = [own[name] for name in names]
        predicted = forest.predict(np.column_stack([np.tile(known, (len(points), 1)), points]))
        if trials:
            others = np.array([encode(self.space, trial.drawn) for trial in trials])
            gaps = np.sqrt(((points[:, None] - others[None]) ** 2).mean(-1)).min(1)
            predicted = np.where(gaps < _APART, np.inf, predicted)
        return candidates[int(np.argmin(predicted))] if np.isfinite(predicted).any() else None


def _unusable(study: PastStudy, goal: Goal) -> str:
    """Returns why a study cannot be learned from; empty if it can."""
    if len(study.goal.objectives) > 1:
        return f"it searched {len(study.goal.objectives)} objectives at once"
    if (study.goal.objective, study.goal.maximize) != (goal.objective, goal.maximize):
        return f"it searched the {'greatest' if study.goal.maximize else 'least'} {study.goal.objective}"
    if not any(name in goal.space.parameters for name in study.goal.space.parameters):
        return "it shares no parameter"
    return "" if study.ranked else "none of its trials has a value"


def _differences(study: PastStudy, space: Space) -> str:
    """Says which parameters a study lacks; empty if it has all."""
    missing = [name for name in space.parameters if name not in study.goal.space.parameters]
    verb = "begins" if len(missing) == 1 else "begin"
    return f"{', '.join(missing)}, which {study.name} lacks, {verb} at the default" if missing else ""


def _moved(parameter: Any, value: Any) -> Any:
    """Returns the end of a range that a number lies beyond; None where there is none."""
    if not isinstance(parameter, Float | Int) or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    moved = min(max(value, parameter.low), parameter.high)
    return round(moved) if isinstance(parameter, Int) else float(moved)
