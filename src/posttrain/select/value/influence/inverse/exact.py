"""The exact inverse, of few parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.select.value.influence.curvature import Curvature
from posttrain.select.value.influence.inverse.solution import Solution, check_damping, relative
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Exact:
    """LU factors of the whole matrix in float64; P cubed operations, and 8 P squared bytes a few times over.

    A Hessian with negative eigenvalues is inverted as well: the scores are then those at a saddle.
    """

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """As `posttrain.select.value.influence.inverse.solution.Solver` has it.

        Raises:
            UserError: the matrix is singular, or too large.
        """
        check_damping(damping)
        whole = curvature.dense()
        whole.diagonal().add_(damping)
        wanted = b.double()
        x, failed = torch.linalg.solve_ex(whole, wanted)
        left = relative(whole @ x - wanted, wanted)
        if int(failed) or not bool(torch.isfinite(x).all()) or left.max(initial=0.0) > 1e-3:
            raise UserError("the curvature is singular", where="influence.damping", fix="raise it")
        return Solution(x, left)
