"""The interface of inverse Hessian-vector solvers."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from posttrain.attribution.influence.curvature import Curvature
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Solution:
    """An exact or approximate solution x of (H + damping I) x = b.

    Attributes:
        x: [P, m].
        residuals: float64 [m], ``|(H + damping) x - b| / |b|`` of each column, 0 where b is 0; None from a solver that
            replaces H by another matrix.
    """

    x: Tensor
    residuals: npt.NDArray[np.float64] | None


class Solver(Protocol):
    """Solves (H + damping I) x = b. Its ``repr`` is part of the key of cached solutions, so it names all settings."""

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """Solves for each of the columns of b, [P, m].

        Raises:
            UserError: this solver cannot invert the curvature.
        """
        ...


def check_damping(damping: float) -> None:
    """Raises a UserError unless the damping is finite and 0 or more."""
    if not 0 <= damping < float("inf"):
        raise UserError(f"the damping must be 0 or more, not {damping}", where="influence.damping")
