"""The goal of a study, and how its database keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy

from posttrain.store.errors import UserError
from posttrain.tune.objectives import Objective, Objectives, read_objectives
from posttrain.tune.space import Space, changes
from posttrain.tune.trial import Trial, best_trial

_GOAL = "goal"
"""The attribute of a study with its goal: a study without it was killed as it was begun."""


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

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Returns the goal that `to_json` was called on."""
        several = content["several"]
        return cls(
            content["objective"],
            content["maximize"],
            Space.of(content["space"]),
            content["identity"],
            None if several is None else read_objectives(several["objectives"], several["choose"]),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the goal as JSON values."""
        return {
            "objective": self.objective,
            "maximize": self.maximize,
            "space": self.space.to_json(),
            "identity": dict(self.identity),
            "several": None if self.several is None else self.several.to_json(),
        }

    @property
    def objectives(self) -> Objectives:
        """All objectives, also where there is one."""
        return self.several or Objectives((Objective(self.objective, self.maximize),))

    def best_trial(self, trials: Sequence[Trial]) -> Trial | None:
        """Returns the best trial; of several objectives the one that is chosen of the front.

        Before any trial has finished, there is no front: then it is that with the best first objective.
        """
        front = self.objectives.front(trials) if len(self.objectives) > 1 else []
        return self.objectives.choose_trial(front) or best_trial(trials, maximize=self.maximize)


def stored_goal(study: FrozenStudy) -> Goal:
    """Returns the goal of a study in the database."""
    return Goal.from_json(study.user_attrs[_GOAL])


def find_study(storage: BaseStorage, name: str) -> FrozenStudy | None:
    """Returns the study of a name; None if it was never begun."""
    studies = storage.get_all_studies()
    return next((study for study in studies if study.study_name == name and _GOAL in study.user_attrs), None)


def open_study(storage: BaseStorage, name: str, goal: Goal, location: str) -> int:
    """Returns the id of the study to work on, which is begun if need be.

    Raises:
        UserError: the study has another goal.
    """
    stored = find_study(storage, name)
    if stored is None:
        return _begin(storage, name, goal)
    before = stored_goal(stored)
    searched = [item.text for item in before.objectives.items]
    if searched != [item.text for item in goal.objectives.items]:
        raise UserError(f"the study searches the {', '.join(searched)}", where=location, fix="name another --out")
    names = [name for name, value in goal.identity.items() if before.identity.get(name) != value]
    if names:
        what = f"{', '.join(names)}: not as the study was begun, so that values cannot be compared"
        raise UserError(what, where=location, fix="name another --out")
    if lines := changes(before.space, goal.space):
        fix = "take that back, or name another --out and this folder as warm_start"
        raise UserError(f"the space has changed: {'; '.join(lines)}", where=location, fix=fix)
    if goal.several != before.several:  # limits and the rule of choice change no value
        storage.set_study_user_attr(stored._study_id, _GOAL, goal.to_json())
    return stored._study_id


def _begin(storage: BaseStorage, name: str, goal: Goal) -> int:
    for study in storage.get_all_studies():
        if study.study_name == name:  # it was killed as it was begun
            storage.delete_study(study._study_id)
    directions = [
        StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE for maximize in goal.objectives.directions
    ]
    study_id = storage.create_new_study(directions, name)
    if goal.several is not None:
        storage.set_study_system_attr(study_id, "study:metric_names", list(goal.several.names))  # its dashboard's axes
    storage.set_study_user_attr(study_id, _GOAL, goal.to_json())
    return study_id
