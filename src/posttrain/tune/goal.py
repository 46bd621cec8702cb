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

ONE_VALUE = Objectives((Objective("value"),))
"""The objectives of a function that returns one value, of which less is better."""

_GOAL = "goal"
"""The attribute of a study with its goal: a study without it was killed as it was begun."""


@dataclass(frozen=True)
class Goal:
    """The goal of a study: the least, or the greatest, value of one objective or several over a space.

    Attributes:
        space: the space.
        objectives: what is searched.
        identity: what else decides the values, such as a digest of the data, by name.
    """

    space: Space
    objectives: Objectives = ONE_VALUE
    identity: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Returns the goal that `to_json` was called on."""
        stored = content["objectives"]
        objectives = read_objectives(stored["objectives"], stored["choose"])
        return cls(Space.of(content["space"]), objectives, content["identity"])

    def to_json(self) -> dict[str, Any]:
        """Returns the goal as JSON values."""
        return {
            "space": self.space.to_json(),
            "objectives": self.objectives.to_json(),
            "identity": dict(self.identity),
        }

    @property
    def objective(self) -> str:
        """The name of the first objective."""
        return self.objectives.names[0]

    @property
    def maximize(self) -> bool:
        """True if greater values of the first objective are better."""
        return self.objectives.directions[0]

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
    if goal.objectives != before.objectives:  # limits and the rule of choice change no value
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
    if len(goal.objectives) > 1:
        storage.set_study_system_attr(study_id, "study:metric_names", list(goal.objectives.names))  # for its dashboard
    storage.set_study_user_attr(study_id, _GOAL, goal.to_json())
    return study_id
