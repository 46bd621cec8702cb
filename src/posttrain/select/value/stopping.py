"""When enough was drawn at random."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.select.value.utilities.utility import Floats
from posttrain.store.errors import UserError

Over = Literal["max", "mean"]


@dataclass(frozen=True)
class Stop:
    """Stop before all is drawn, once standard errors have fallen to a bound.

    Attributes:
        standard_error: the bound, in the utility's unit; None never stops.
        over: whether the largest or the mean of the standard errors must reach it.
    """

    standard_error: float | None
    over: Over

    def __post_init__(self) -> None:
        if self.standard_error is not None and not self.standard_error > 0:
            raise UserError(f"standard_error must be positive, and is {self.standard_error}")
        if self.over not in ("max", "mean"):
            raise UserError(f"no rule `{self.over}` over standard errors", fix="max or mean")

    def reached(self, errors: Floats) -> bool:
        """Whether the errors, float64 [N], are small enough; NaN, too few samples, is not."""
        if self.standard_error is None:
            return False
        return bool((np.max(errors) if self.over == "max" else np.mean(errors)) <= self.standard_error)
