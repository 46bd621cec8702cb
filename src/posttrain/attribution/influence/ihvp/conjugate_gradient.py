"""Inverse Hessian-vector products by conjugate gradient."""

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.ihvp.solver import Solution, check_damping
from posttrain.store.errors import UserError

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class ConjugateGradient:
    """Conjugate gradient (M. R. Hestenes and E. Stiefel 1952; for influence: Koh and Liang 2017, section 3).

    The columns of b are solved side by side, each with step lengths of its own; a step costs one product with H over
    all records. It takes any model, and reports how far each solution is from exact.

    Args:
        tolerance: relative residual at which a column is done; columns that end ten times above it are warned of.
        steps: greatest number of steps.
    """

    tolerance: float = 1e-5
    steps: int = 200

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """Solves as `posttrain.attribution.influence.ihvp.solver.Solver` specifies.

        Raises:
            UserError: the curvature has a direction in which it is not positive.
        """
        check_damping(damping)
        x, residual = torch.zeros_like(b), b.clone()
        direction = b.clone()
        squares = _column_dots(residual, residual)
        goal = squares * self.tolerance**2
        for _ in range(self.steps):
            # Only columns that have not converged take part: a step of a converged one divides noise by noise.
            active = squares > goal
            if not bool(active.any()):
                break
            search = direction[:, active]
            product = curvature.product(search) + damping * search
            curved = _column_dots(search, product)
            if bool((curved <= 0).any()) or not bool(torch.isfinite(curved).all()):
                raise UserError(
                    "conjugate gradient met a direction in which the curvature is not positive",
                    where="influence.damping",
                    fix="raise it",
                )
            step = (squares[active] / curved).to(b.dtype)
            x[:, active] += step * search
            residual[:, active] -= step * product
            new_squares = _column_dots(residual[:, active], residual[:, active])
            direction[:, active] = residual[:, active] + (new_squares / squares[active]).to(b.dtype) * search
            squares[active] = new_squares
        # Computed anew for the price of one product: the recurrence's own residual drifts away from the true one.
        residuals = _relative_norms(curvature.product(x) + damping * x - b, b)
        if (wrong := int((residuals > 10 * self.tolerance).sum())) > 0:
            log.warning(
                "conjugate gradient: %d of %d test records are solved to a residual above %g, up to %.2g; "
                "allow more steps or raise the damping",
                wrong, len(residuals), 10 * self.tolerance, residuals.max(),
            )  # fmt: skip
        return Solution(x, residuals)


def _relative_norms(residual: Tensor, b: Tensor) -> npt.NDArray[np.float64]:
    """Returns the norms of the columns of [P, m] in units of b's; 0 where b is 0."""
    scale = _column_dots(b, b).sqrt()
    norms = torch.where(scale > 0, _column_dots(residual, residual).sqrt() / scale, 0)
    return norms.cpu().numpy().astype(np.float64)


def _column_dots(first: Tensor, second: Tensor) -> Tensor:
    # Summed in float64: step lengths are ratios of sums over millions of parameters.
    return (first.double() * second.double()).sum(0)
