"""Running means with standard errors, and the rule that stops sampling once the errors are small."""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from posttrain.attribution.utility import Floats
from posttrain.store.errors import UserError

ErrorReduction = Literal["max", "mean"]


class Moments:
    """Count, mean and sum of squared distances from the mean, of each of N numbers.

    Updated by B. P. Welford's formula ("Note on a method for calculating corrected sums of squares and products",
    Technometrics, 1962) and merged by that of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for
    computing sample variances", 1979): no difference of large sums is taken.

    Attributes:
        count: int64 [N].
        mean: float64 [N], 0 where the count is.
        squares: float64 [N].
    """

    def __init__(self, size: int) -> None:
        self.count = np.zeros(size, dtype=np.int64)
        self.mean = np.zeros(size)
        self.squares = np.zeros(size)

    @classmethod
    def of(cls, arrays: dict[str, npt.NDArray[np.generic]]) -> Self:
        """From what `arrays` gives."""
        made = cls(0)
        made.count = arrays["count"].astype(np.int64)
        made.mean, made.squares = arrays["mean"].astype(np.float64), arrays["squares"].astype(np.float64)
        return made

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """All of it by name."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def add(self, sample: Floats | float, where: npt.NDArray[np.bool_] | None = None) -> None:
        """Take in a sample of each number, float64 [N] or one for all, or only of those where ``where``, bool [N]."""
        taken: npt.NDArray[np.bool_] | int = 1 if where is None else where
        self.count += taken
        difference = (sample - self.mean) * taken
        self.mean += difference / np.maximum(self.count, 1)
        self.squares += difference * (sample - self.mean)

    def merge(self, other: "Moments") -> None:
        """Take in all that another has taken in."""
        count = self.count + other.count
        difference = other.mean - self.mean
        share = other.count / np.maximum(count, 1)
        self.squares += other.squares + difference**2 * self.count * share
        self.mean += difference * share
        self.count = count

    def standard_errors(self) -> Floats:
        """Of the means, float64 [N]; NaN where fewer than two samples were taken."""
        enough = self.count > 1
        count = np.where(enough, self.count, 2)
        errors: Floats = np.where(enough, np.sqrt(self.squares / (count - 1) / count), np.nan)
        return errors


@dataclass(frozen=True)
class StoppingRule:
    """Stop before all is drawn, once standard errors have fallen to a bound.

    Attributes:
        standard_error: the bound, in the utility's unit; None never stops.
        over: whether the largest or the mean of the standard errors must reach it.
    """

    standard_error: float | None
    over: ErrorReduction

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
