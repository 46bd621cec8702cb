"""Opens the latest version of a study; a changed space begins a new one."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy

from posttrain.store.errors import UserError
from posttrain.tune.events import EXCLUDED_KEY, OPTUNA_STATES, SPENT_KEY, TRIAL_KEY, read_events
from posttrain.tune.objectives import Objective, Objectives, read_objectives
from posttrain.tune.space import Space, changes
from posttrain.tune.storage import to_distribution, to_optuna
from posttrain.tune.trial import SPACE_NOTE, Trial, TrialState, best_trial

log = logging.getLogger("posttrain")

_SEVERAL = "several"
"""The attribute of a study with several objectives."""

_EXCLUDED = "is no point of the space as it is now"


@dataclass(frozen=True)
class Goal:
    """The goal of a study: the least, or the greatest, value of an objective over a space.

    Attributes:
        objective: name of what is measured.
        maximize: whether greater values are better.
        space: the space.
        identity: what else decides the values, such as a digest of the data, by name.
        several: several objectives; ``objective`` and ``maximize`` become those of the first.
    """

    objective: str
    maximize: bool
    space: Space
    identity: Mapping[str, str] = field(default_factory=dict)
    several: Objectives | None = None

    def __post_init__(self) -> None:
        if self.several is not None:
            object.__setattr__(self, "objective", self.several.items[0].name)
            object.__setattr__(self, "maximize", self.several.items[0].maximize)

    @property
    def objectives(self) -> Objectives:
        """All objectives, also where there is one."""
        return self.several or Objectives((Objective(self.objective, self.maximize),))

    @property
    def directions(self) -> list[StudyDirection]:
        """Optuna's words for them."""
        return [StudyDirection.MAXIMIZE if item else StudyDirection.MINIMIZE for item in self.objectives.directions]

    def best_trial(self, trials: Sequence[Trial]) -> Trial | None:
        """Returns the best trial; of several objectives the one that is chosen of the front.

        Before any trial has finished, there is no front: then it is that with the best first objective.
        """
        front = self.objectives.front(trials) if len(self.objectives) > 1 else []
        return self.objectives.choose_trial(front) or best_trial(trials, maximize=self.maximize)


def stored_goal(study: FrozenStudy) -> Goal:
    """Returns the goal of a study in the database."""
    attributes = study.user_attrs
    maximize = study.directions[0] == StudyDirection.MAXIMIZE
    space, stored = Space.of(attributes["space"]), attributes.get(_SEVERAL)
    several = None if stored is None else read_objectives(stored["objectives"], stored["choose"])
    return Goal(attributes["objective"], maximize, space, attributes["identity"], several)


def latest_version(storage: BaseStorage, name: str) -> FrozenStudy | None:
    """Returns the latest whole version of a study; None if it was never begun."""
    versions = [study for study in _versions(storage, name) if study.user_attrs.get("complete")]
    return versions[-1] if versions else None


def open_version(storage: BaseStorage, name: str, goal: Goal, migrate: bool, location: str) -> int:
    """Returns the id of the study to work on, which is begun, or migrated to another space, if need be.

    Raises:
        UserError: the study has another objective, or another space and ``migrate`` is False.
    """
    for study in _versions(storage, name):
        if not study.user_attrs.get("complete"):  # a migration that was killed: the original is untouched
            storage.delete_study(study._study_id)
    latest = latest_version(storage, name)
    if latest is None:
        study_id = _begin(storage, name, goal)
        storage.set_study_user_attr(study_id, "complete", True)
        return study_id
    before = stored_goal(latest)
    searched = [item.text for item in before.objectives.items]
    if searched != [item.text for item in goal.objectives.items]:
        raise UserError(f"the study searches the {', '.join(searched)}", where=location, fix="name another --out")
    names = [name for name, value in goal.identity.items() if before.identity.get(name) != value]
    if names:
        what = f"{', '.join(names)}: not as the study was begun, so that values cannot be compared"
        raise UserError(what, where=location, fix="name another --out")
    lines = changes(before.space, goal.space)
    if not lines:
        if goal.several != before.several:  # limits and the rule of choice change no value
            _write_several(storage, latest._study_id, goal)
        return latest._study_id
    if not migrate:
        fix = "take that back, carry the trials over with --migrate, or name another --out"
        raise UserError(f"the space has changed: {'; '.join(lines)}", where=location, fix=fix)
    return _migrate(storage, latest._study_id, name, goal)


def _versions(storage: BaseStorage, name: str) -> list[FrozenStudy]:
    studies = [study for study in storage.get_all_studies() if study.user_attrs.get("series") == name]
    return sorted(studies, key=lambda study: study._study_id)


def _begin(storage: BaseStorage, series: str, goal: Goal) -> int:
    # Others have their names in a database, too; and a kill may leave a study of ours that has nothing but its name.
    taken = {study.study_name for study in storage.get_all_studies()}
    names = chain([series], (f"{series} ({number})" for number in count(2)))
    study_id = storage.create_new_study(goal.directions, next(name for name in names if name not in taken))
    attributes: dict[str, Any] = {"series": series, "objective": goal.objective, "space": goal.space.to_json()}
    attributes["identity"] = dict(goal.identity)
    for key, value in attributes.items():
        storage.set_study_user_attr(study_id, key, value)
    if goal.several is not None:
        storage.set_study_system_attr(study_id, "study:metric_names", list(goal.several.names))  # its dashboard's axes
        _write_several(storage, study_id, goal)
    return study_id


def _write_several(storage: BaseStorage, study_id: int, goal: Goal) -> None:
    if goal.several is not None:
        storage.set_study_user_attr(study_id, _SEVERAL, goal.several.to_json())


def _migrate(storage: BaseStorage, before: int, name: str, goal: Goal) -> int:
    """Copies all trials, under the same numbers, into a new study; those outside of the space are excluded.

    What samplers have noted goes, as it is about the space as it was: a place in its grid, a part of its ranges.
    """
    study_id = _begin(storage, name, goal)
    if (spent := storage.get_study_user_attrs(before).get(SPENT_KEY)) is not None:
        storage.set_study_user_attr(study_id, SPENT_KEY, spent)
    stored = storage.get_all_trials(before, deepcopy=False)
    kept = 0
    for old, trial in zip(stored, read_events(stored, exclude=False).trials, strict=True):
        attributes: dict[str, Any] = {key: value for key, value in old.system_attrs.items() if key != EXCLUDED_KEY}
        drawn: dict[str, Any] = {}
        state, values = TrialState.EXCLUDED, None
        if trial.settings in goal.space:
            drawn = {key: trial.settings[key] for key in goal.space.parameters if key in trial.settings}
            notes = {key: note for key, note in trial.notes.items() if not key.startswith(SPACE_NOTE)}
            attributes[TRIAL_KEY] = {**attributes[TRIAL_KEY], "drawn": drawn, "notes": notes}
            # Not as Optuna has it: the trial may have been excluded, and fits again. One that ran goes on.
            state, values = trial.state if trial.ended else TrialState.PAUSED, trial.values
            kept += 1
        else:
            attributes[EXCLUDED_KEY] = _EXCLUDED
        parameters = {key: goal.space.parameters[key] for key in drawn}
        copy = optuna.trial.create_trial(
            state=OPTUNA_STATES[state],
            values=values if state in (TrialState.FINISHED, TrialState.STOPPED) else None,
            params=to_optuna(parameters, drawn),
            distributions={key: to_distribution(parameter) for key, parameter in parameters.items()},
            user_attrs=old.user_attrs,
            system_attrs=attributes,
            intermediate_values=old.intermediate_values,
        )
        copy.datetime_start = old.datetime_start or copy.datetime_start
        copy.datetime_complete = (old.datetime_complete or copy.datetime_complete) if trial.ended else None
        storage.create_new_trial(study_id, copy)
    storage.set_study_user_attr(study_id, "complete", True)
    log.info("  %d of %d trials are points of the changed space", kept, len(stored))
    return study_id
