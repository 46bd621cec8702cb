"""Running means with standard errors, and the rule that stops sampling once the errors are small."""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from posttrain.attribution.values import Floats
from posttrain.store.errors import UserError

ErrorReduction = Literal["max", "mean"]


class Moments:
    """Count, mean and sum of squared deviations from the mean, of each of N numbers.

    Updated by B. P. Welford's formula ("Note on a method for calculating corrected sums of squares and products",
    Technometrics, 1962) and merged by that of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for
    computing sample variances", 1979).

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
    def from_arrays(cls, arrays: dict[str, npt.NDArray[np.generic]]) -> Self:
        """Restores what `arrays` returned."""
        moments = cls(0)
        moments.count = arrays["count"].astype(np.int64)
        moments.mean = arrays["mean"].astype(np.float64)
        moments.squares = arrays["squares"].astype(np.float64)
        return moments

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Returns the three arrays by name."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def add(self, sample: Floats | float, where: npt.NDArray[np.bool_] | None = None) -> None:
        """Adds a sample of each number, float64 [N] or one for all, or only where ``where``, bool [N], is set."""
        weight: npt.NDArray[np.bool_] | int = 1 if where is None else where
        self.count += weight
        # Welford: deviations from the running mean, as a difference of large sums would cancel.
        difference = (sample - self.mean) * weight
        self.mean += difference / np.maximum(self.count, 1)
        self.squares += difference * (sample - self.mean)

    def merge(self, other: "Moments") -> None:
        """Adds all samples that another has seen."""
        count = self.count + other.count
        difference = other.mean - self.mean
        # Means are moved by their weighted difference, not recomputed from sums, which would lose digits.
        share = other.count / np.maximum(count, 1)
        self.squares += other.squares + difference**2 * self.count * share
        self.mean += difference * share
        self.count = count

    def standard_errors(self) -> Floats:
        """Returns the standard errors of the means, float64 [N]; NaN for fewer than two samples."""
        enough = self.count > 1
        count = np.where(enough, self.count, 2)
        errors: Floats = np.where(enough, np.sqrt(self.squares / (count - 1) / count), np.nan)
        return errors


@dataclass(frozen=True)
class StoppingRule:
    """Stops sampling early, once the standard errors have fallen to a bound.

    Attributes:
        standard_error: the bound, in the utility's unit; None never stops.
        reduction: the largest (``max``) or the ``mean`` of the standard errors must reach the bound.
    """

    standard_error: float | None
    reduction: ErrorReduction

    def __post_init__(self) -> None:
        if self.standard_error is not None and not self.standard_error > 0:
            raise UserError(f"standard_error must be positive, and is {self.standard_error}")
        if self.reduction not in ("max", "mean"):
            raise UserError(f"no reduction `{self.reduction}` of standard errors", fix="max or mean")

    def reached(self, errors: Floats) -> bool:
        """Returns True once the errors, float64 [N], are small enough."""
        if self.standard_error is None:
            return False
        # A NaN, of a player with too few samples, makes the comparison False: sampling continues.
        return bool((np.max(errors) if self.reduction == "max" else np.mean(errors)) <= self.standard_error)
