"""The exact inverse, for models with few parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.ihvp.solver import Solution, check_damping, relative_norms
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Exact:
    """LU factors of the whole matrix in float64; P cubed operations, and 8 P squared bytes a few times over.

    A Hessian with negative eigenvalues is inverted as well: the scores are then those at a saddle.
    """

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """As `posttrain.attribution.influence.ihvp.solver.Solver` has it.

        Raises:
            UserError: the matrix is singular, or too large.
        """
        check_damping(damping)
        whole = curvature.dense()
        whole.diagonal().add_(damping)
        wanted = b.double()
        x, failed = torch.linalg.solve_ex(whole, wanted)
        left = relative_norms(whole @ x - wanted, wanted)
        if int(failed) or not bool(torch.isfinite(x).all()) or left.max(initial=0.0) > 1e-3:
            raise UserError("the curvature is singular", where="influence.damping", fix="raise it")
        return Solution(x, left)
