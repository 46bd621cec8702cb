"""What a method says that each training record is worth."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Values:
    """The value of each training record: what it adds to the utility of a model that learns from it.

    Attributes:
        values: float64 [N] in the utility's unit; negative for a record that does harm.
        standard_errors: float64 [N] of the values, over what the method drew at random; 0 where a value is exact, NaN
            where too little was drawn to tell.
        evaluations: how often the utility was computed, a whole training each unless the method says otherwise.
    """

    values: npt.NDArray[np.float64]
    standard_errors: npt.NDArray[np.float64]
    evaluations: int
