"""Inverse Hessian-vector products by conjugate gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.ihvp.solver import Solution, check_damping, relative_residuals, warn_residuals
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class ConjugateGradient:
    """Conjugate gradient (M. R. Hestenes and E. Stiefel 1952; for influence: Koh and Liang 2017, section 3).

    The columns of b are solved side by side, each with step lengths of its own; a product with H a step, over all
    records. Sums over parameters are float64.

    Args:
        tolerance: relative residual at which a column is done; those that end above it are warned of.
        steps: at most so many.
    """

    tolerance: float = 1e-5
    steps: int = 200

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """As `posttrain.attribution.influence.ihvp.solver.Solver` has it.

        Raises:
            UserError: the curvature has a direction in which it is not positive.
        """
        check_damping(damping)
        x, left = torch.zeros_like(b), b.clone()
        direction = b.clone()
        squares = _column_dots(left, left)
        goal = squares * self.tolerance**2
        for _ in range(self.steps):
            going = squares > goal
            if not bool(going.any()):
                break
            active = direction[:, going]
            pushed = curvature.product(active) + damping * active
            curved = _column_dots(active, pushed)
            if bool((curved <= 0).any()) or not bool(torch.isfinite(curved).all()):
                raise UserError(
                    "conjugate gradient met a direction in which the curvature is not positive",
                    where="influence.damping",
                    fix="raise it, or take the Gauss-Newton matrix",
                )
            step = (squares[going] / curved).to(b.dtype)
            x[:, going] += step * active
            left[:, going] -= step * pushed
            now = _column_dots(left[:, going], left[:, going])
            direction[:, going] = left[:, going] + (now / squares[going]).to(b.dtype) * active
            squares[going] = now
        # What the recurrence believes drifts away from the truth.
        found = relative_residuals(curvature, x, b, damping)
        warn_residuals("conjugate gradient", found, 10 * self.tolerance, "allow more steps or raise the damping")
        return Solution(x, found)


def _column_dots(one: Tensor, other: Tensor) -> Tensor:
    return (one.double() * other.double()).sum(0)
