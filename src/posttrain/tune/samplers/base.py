"""The interface of samplers, which propose the settings of trials."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from posttrain.tune.losses import comparable_values
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial


@dataclass(frozen=True)
class Proposal:
    """The settings of a trial to come.

    Attributes:
        drawn: a value for each parameter of the space that exists.
        notes: JSON values that are kept with the trial, for the sampler's own later calls.
    """

    drawn: Mapping[str, Any]
    notes: Mapping[str, Any] = field(default_factory=dict)


Directions = bool | Sequence[bool]
"""True if greater values are better; of several objectives, a value for each."""


class Sampler(ABC):
    """Proposes the settings of trials.

    To write one, derive from this class and define `propose`. It is called once for each trial, with its number and
    with all trials before it, which have the settings, the reports so far and the value. A sampler is a function of
    these and of its seed: it may cache what it computes, but a new object must propose the same, as a study that was
    killed continues with one. Random numbers therefore come from `generator`, which is new for each trial; what else
    must last belongs into the notes of a proposal. Proposals meet the constraints of the space (`Space.is_feasible`).

    `posttrain.testing.samplers.SamplerContract` tests all of that.

    Args:
        space: what is searched.
        seed: fixes every random choice.
        maximize: whether greater values are better; of several objectives, of each.

    Attributes:
        several_objectives: whether it can search several objectives.
        directions: whether greater values are better, of each objective; ``maximize`` is that of the first.
    """

    several_objectives: ClassVar[bool] = False

    def __init__(self, space: Space, seed: int = 0, maximize: Directions = False) -> None:
        self.space, self.seed = space, seed
        self.directions = (maximize,) if isinstance(maximize, bool) else tuple(maximize)
        self.maximize = self.directions[0]

    @abstractmethod
    def propose(self, number: int, trials: Sequence[Trial]) -> Proposal | None:
        """Returns the settings of a trial; None if there is nothing left to try.

        Args:
            number: its number.
            trials: the trials before it, by number, also those that run.
        """

    def generator(self, number: int) -> np.random.Generator:
        """Returns the source of random numbers of a trial."""
        return np.random.default_rng([self.seed, number])

    def comparable_losses(self, trials: Sequence[Trial]) -> dict[int, float]:
        """Returns the values of trials that were trained equally long, by their number; less is better.

        Others are left out: values at different steps of a training cannot be compared (`comparable_values`).
        """
        sign = -1.0 if self.maximize else 1.0
        values = comparable_values(self.space, trials).values
        return {number: sign * value for number, value in values.items()}
