"""Optuna's samplers: they see a study's trials through a storage in memory, as this program's own study has them."""

import math
import warnings
from collections.abc import Callable, Container, Sequence
from typing import Any, ClassVar

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from posttrain.tune.parameters import Choice, Parameter
from posttrain.tune.samplers.base import Directions, Proposal, Sampler
from posttrain.tune.space import Space
from posttrain.tune.storage import to_distribution
from posttrain.tune.trial import Trial, TrialState

_CONSTRAINT = "constraints:settings"
"""The attribute in which Optuna's trials have a constraint: above 0 it is broken."""

_MAX_DRAWS = 10  # of one trial by a sampler, before random points are drawn until one meets the constraints


class OptunaSampler(Sampler):
    """Has a sampler of Optuna's propose trials.

    A paused trial is a pruned one to it, so that samplers learn from trials that the scheduler may still resume; with
    several objectives they learn from finished trials alone. A trial whose settings made it fail is shown as one that
    breaks a constraint, as Optuna's samplers learn to keep constraints. Before the first value they do not see it, as
    nothing is better than it. If a proposal does not meet the constraints of the space, a random point is drawn.

    Args:
        make: returns the sampler, given a seed of NumPy's old generators.
    """

    several_objectives: ClassVar[bool] = True

    def __init__(self, space: Space, seed: int, maximize: Directions, make: Callable[[int], BaseSampler]) -> None:
        super().__init__(space, seed, maximize)
        self._make = make
        self._distributions = {name: _distribution(parameter) for name, parameter in space.parameters.items()}
        self._storage = _TrialView()
        # Several objectives are all minimised: crowding distances break ties by the order of the values.
        self._signs = [-1.0 if item and len(self.directions) > 1 else 1.0 for item in self.directions]
        least = len(self.directions) > 1 or not self.maximize
        direction = StudyDirection.MINIMIZE if least else StudyDirection.MAXIMIZE
        self._worst = [math.inf if least else -math.inf] * len(self.directions)
        self._storage.create_new_study([direction] * len(self.directions), "view")
        self._shown: list[Trial] = []
        self._constrained = False  # whether trials are shown with a constraint

    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal:
        self._update(trials)
        generator = self.generator(number)
        # A new one for each trial, which is what makes proposals follow from the seed and the trials alone.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental options
            sampler = self._make(int(generator.integers(2**32)))
            for _ in range(_MAX_DRAWS):
                drawn, notes = self._draw(sampler, number)
                if self.space.is_feasible(self.space.complete(drawn)):
                    return Proposal(drawn, notes)
        return Proposal(self.space.draw(generator))

    def _draw(self, sampler: BaseSampler, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draws as Optuna's own trials do: first what the sampler draws together, then what is left, one by one."""
        self._storage.attributes = {}
        study = Study("view", self._storage, sampler)
        frozen = _frozen(number, OptunaState.RUNNING, {}, {})
        sampler.before_trial(study, frozen)
        together = sampler.infer_relative_search_space(study, frozen)
        values = sampler.sample_relative(study, frozen, together)
        drawn: dict[str, Any] = {}
        for name, parameter in self.space.parameters.items():
            if not self.space.exists(name, drawn):
                continue
            distribution = self._distributions[name]
            if name in values and distribution._contains(distribution.to_internal_repr(values[name])):
                value = values[name]
            else:
                value = sampler.sample_independent(study, frozen, name, distribution)
            drawn[name] = parameter.values[value] if isinstance(parameter, Choice) else value
            frozen.params[name], frozen.distributions[name] = value, distribution
        return drawn, self._storage.attributes

    def _update(self, trials: Sequence[Trial]) -> None:
        """Shows the sampler trials that are new or have changed."""
        constrained = any(trial.has_bad_settings for trial in trials) and any(
            trial.latest is not None for trial in trials
        )
        if constrained is not self._constrained:
            self._constrained = constrained
            self._shown.clear()
            self._storage.trials.clear()
        for trial in trials:
            if trial.number < len(self._shown) and self._shown[trial.number] is trial:
                continue
            parameters = {name: self._shown_value(name, value) for name, value in trial.drawn.items()}
            state, values = self._state(trial), None
            if state in _WITH_VALUE and trial.latest_values is not None:
                values = [sign * value for sign, value in zip(self._signs, trial.latest_values, strict=True)]
            elif state is OptunaState.COMPLETE:  # it has bad settings
                values = self._worst
            attributes = dict(trial.notes)
            if self._constrained:
                # Optuna's Gaussian process wants the constraint of all trials.
                attributes[_CONSTRAINT] = 1.0 if trial.has_bad_settings else -1.0
            shown = _frozen(
                trial.number,
                state,
                parameters,
                {name: self._distributions[name] for name in trial.drawn},
                values=values,
                intermediate={report.step: report.value for report in trial.reports},
                attributes=attributes,
            )
            if trial.number < len(self._shown):
                self._shown[trial.number], self._storage.trials[trial.number] = trial, shown
            else:
                self._shown.append(trial)
                self._storage.trials.append(shown)

    def _shown_value(self, name: str, value: Any) -> Any:
        parameter = self.space.parameters[name]
        return parameter.index(value) if isinstance(parameter, Choice) else value

    def _state(self, trial: Trial) -> OptunaState:
        if trial.state is TrialState.PAUSED and not trial.reports:
            return OptunaState.RUNNING
        if self._constrained and trial.has_bad_settings:
            return OptunaState.COMPLETE
        state = _STATES[trial.state]
        # Optuna compares pruned trials by one objective alone. As finished ones those that ended early would be on the
        # front for what little they have cost.
        return OptunaState.FAIL if state is OptunaState.PRUNED and len(self.directions) > 1 else state


def _distribution(parameter: Parameter) -> BaseDistribution:
    """Returns Optuna's form of a parameter: of a choice that of its indices, as 1, 1.0 and true are one to Optuna."""
    if isinstance(parameter, Choice):
        return CategoricalDistribution(range(len(parameter.values)))
    return to_distribution(parameter)


_WITH_VALUE = (OptunaState.COMPLETE, OptunaState.PRUNED)

_STATES = {
    TrialState.RUNNING: OptunaState.RUNNING,
    TrialState.PAUSED: OptunaState.PRUNED,
    TrialState.FINISHED: OptunaState.COMPLETE,
    TrialState.STOPPED: OptunaState.PRUNED,
    TrialState.FAILED: OptunaState.FAIL,
}


class _TrialView(InMemoryStorage):
    """Shows a list of trials, and collects what a sampler notes of the one that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.trials: list[FrozenTrial] = []
        self.attributes: dict[str, Any] = {}

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[OptunaState] | None = None
    ) -> list[FrozenTrial]:
        return self.trials if states is None else [trial for trial in self.trials if trial.state in states]

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Forgets it: samplers cache there what follows from the trials, in an order that it does not have afresh."""


def _frozen(
    number: int,
    state: OptunaState,
    params: dict[str, Any],
    distributions: dict[str, BaseDistribution],
    values: Sequence[float] | None = None,
    intermediate: dict[int, float] | None = None,
    attributes: dict[str, Any] | None = None,
) -> FrozenTrial:
    return FrozenTrial(
        number=number,
        trial_id=number,
        state=state,
        value=None,
        values=values,
        params=params,
        distributions=distributions,
        user_attrs={},
        system_attrs=attributes or {},
        intermediate_values=intermediate or {},
        datetime_start=None,
        datetime_complete=None,
    )
