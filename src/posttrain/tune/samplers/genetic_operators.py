"""Operators of genetic algorithms that Optuna lacks, in its interface."""

import numpy as np
from optuna.samplers.nsgaii import BaseCrossover, BaseMutation
from optuna.study import Study

_DEVIATION = 0.1  # of a mutation, as a share of the range


class OnePointCrossover(BaseCrossover):
    """Takes the settings before a random point from one parent, and those after it from the other (Holland 1975)."""

    n_parents = 2

    def crossover(
        self,
        parents_params: np.ndarray,
        rng: np.random.RandomState,
        study: Study,
        search_space_bounds: np.ndarray,
    ) -> np.ndarray:
        """Returns a child, float64 [parameters].

        Args:
            parents_params: float64 [2, parameters].
            rng: source of random numbers.
            study, search_space_bounds: not needed.
        """
        first, second = parents_params
        # At least one of each, where there are two.
        point = rng.randint(1, len(first)) if len(first) > 1 else rng.randint(0, 2)
        child: np.ndarray = np.concatenate([first[:point], second[point:]])
        return child


class GaussianMutation(BaseMutation):
    """Adds a normal deviate of a tenth of the range; beyond an end of it, the value is the end."""

    def mutation(
        self, param: float, rng: np.random.RandomState, study: Study, search_space_bounds: np.ndarray
    ) -> float:
        """Returns the changed value.

        Args:
            param: the value, of a logarithmic range its logarithm.
            rng: source of random numbers.
            study: not needed.
            search_space_bounds: float64 [2], the ends of the range.
        """
        low, high = search_space_bounds
        return float(np.clip(param + rng.normal(0.0, _DEVIATION * (high - low)), low, high))
