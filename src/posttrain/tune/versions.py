"""Which study of a database is worked on: the latest version of its name; a changed space begins a new version."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy

from posttrain.store.errors import UserError
from posttrain.tune.events import EXCLUDED_KEY, TRIAL_KEY
from posttrain.tune.space import Space, changes
from posttrain.tune.storage import to_distribution, to_optuna

log = logging.getLogger("posttrain")

_EXCLUDED = "is no point of the space as it is now"


@dataclass(frozen=True)
class Goal:
    """The goal of a study: the least, or the greatest, value of an objective over a space.

    Attributes:
        objective: name of what is measured.
        maximize: whether greater values are better.
        space: the space.
        identity: what else decides the values, such as a digest of the data, by name.
    """

    objective: str
    maximize: bool
    space: Space
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def direction(self) -> StudyDirection:
        """Optuna's word for it."""
        return StudyDirection.MAXIMIZE if self.maximize else StudyDirection.MINIMIZE


def stored_goal(study: FrozenStudy) -> Goal:
    """Returns the goal of a study in the database."""
    attributes = study.user_attrs
    maximize = study.directions == [StudyDirection.MAXIMIZE]
    return Goal(attributes["objective"], maximize, Space.of(attributes["space"]), attributes["identity"])


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
        study_id = _begin(storage, name, name, goal)
        storage.set_study_user_attr(study_id, "complete", True)
        return study_id
    before = stored_goal(latest)
    if (before.objective, before.maximize) != (goal.objective, goal.maximize):
        what = f"the study searches the {'greatest' if before.maximize else 'least'} {before.objective}"
        raise UserError(what, where=location, fix="name another --out")
    names = [name for name, value in goal.identity.items() if before.identity.get(name) != value]
    if names:
        what = f"{', '.join(names)}: not as the study was begun, so that values cannot be compared"
        raise UserError(what, where=location, fix="name another --out")
    lines = changes(before.space, goal.space)
    if not lines:
        return latest._study_id
    if not migrate:
        fix = "take that back, carry the trials over with --migrate, or name another --out"
        raise UserError(f"the space has changed: {'; '.join(lines)}", where=location, fix=fix)
    return _migrate(storage, latest._study_id, name, goal)


def _versions(storage: BaseStorage, name: str) -> list[FrozenStudy]:
    studies = [study for study in storage.get_all_studies() if study.user_attrs.get("series") == name]
    return sorted(studies, key=lambda study: study._study_id)


def _begin(storage: BaseStorage, name: str, series: str, goal: Goal) -> int:
    study_id = storage.create_new_study([goal.direction], name)
    attributes: dict[str, Any] = {"series": series, "objective": goal.objective, "space": goal.space.to_json()}
    attributes["identity"] = dict(goal.identity)
    for key, value in attributes.items():
        storage.set_study_user_attr(study_id, key, value)
    return study_id


def _migrate(storage: BaseStorage, before: int, name: str, goal: Goal) -> int:
    """Copies all trials, under the same numbers, into a new study; those outside of the space count as failed."""
    study_id = _begin(storage, f"{name} ({len(_versions(storage, name)) + 1})", name, goal)
    trials = storage.get_all_trials(before, deepcopy=False)
    kept = 0
    for old in trials:
        settings: Mapping[str, Any] = old.system_attrs[TRIAL_KEY]["settings"]
        attributes: dict[str, Any] = {key: value for key, value in old.system_attrs.items() if key != EXCLUDED_KEY}
        drawn: dict[str, Any] = {}
        if fits := settings in goal.space:
            drawn = {key: settings[key] for key in goal.space.parameters if key in settings}
            attributes[TRIAL_KEY] = {**attributes[TRIAL_KEY], "drawn": drawn}
        else:
            attributes[EXCLUDED_KEY] = _EXCLUDED
        kept += fits
        parameters = {key: goal.space.parameters[key] for key in drawn}
        copy = optuna.trial.create_trial(
            state=old.state if fits else optuna.trial.TrialState.FAIL,
            values=old.values if fits else None,
            params=to_optuna(parameters, drawn),
            distributions={key: to_distribution(parameter) for key, parameter in parameters.items()},
            user_attrs=old.user_attrs,
            system_attrs=attributes,
            intermediate_values=old.intermediate_values,
        )
        copy.datetime_start, copy.datetime_complete = old.datetime_start, old.datetime_complete
        storage.create_new_trial(study_id, copy)
    storage.set_study_user_attr(study_id, "complete", True)
    log.info("  %d of %d trials are points of the changed space", kept, len(trials))
    return study_id
