"""The inverse on the eigenvectors that Arnoldi iteration finds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.ihvp.solver import Solution, check_damping, column_norms, relative_residuals
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Arnoldi:
    """Inverts H on its largest eigenvalues, and takes the rest of space for zero.

    W. E. Arnoldi 1951, for influence A. Schioppa et al., Scaling Up Influence Functions (2022, arXiv:2112.03052),
    section 3: a Krylov basis from a random vector, H projected on it, and the eigenvectors of that with the largest
    eigenvalues in size. The residuals tell how much of each b lies outside; a large one is the method's price, no
    divergence. The basis is made orthogonal twice and held whole: ``steps`` times P numbers.

    Args:
        steps: products with H, at most P.
        rank: eigenvectors kept, at most ``steps``; all when None.
        seed: of the first vector.
    """

    steps: int = 100
    rank: int | None = None
    seed: int = 0

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """As `posttrain.attribution.influence.ihvp.solver.Solver` has it.

        Raises:
            UserError: an eigenvalue and the damping are no more than 0 together, or a number given is below 1.
        """
        check_damping(damping)
        if self.steps < 1 or (self.rank is not None and self.rank < 1):
            raise UserError("steps and rank must be at least 1", where="influence.arnoldi")
        basis, projected = self._krylov(curvature, b)
        eigenvalues, inner = torch.linalg.eigh((projected + projected.T) / 2)
        kept = eigenvalues.abs().argsort(descending=True)[: self.rank]
        damped = eigenvalues[kept] + damping
        if float(damped.min()) <= 0:
            raise UserError(
                f"the curvature has the eigenvalue {float(eigenvalues[kept].min()):.3g}",
                where="influence.damping",
                fix="raise it, or take the Gauss-Newton matrix",
            )
        vectors = basis @ inner[:, kept].to(basis.dtype)
        x = vectors @ ((vectors.T @ b) / damped.to(b.dtype)[:, None])
        return Solution(x, relative_residuals(curvature, x, b, damping))

    def _krylov(self, curvature: Curvature, b: Tensor) -> tuple[Tensor, Tensor]:
        """An orthonormal basis [P, k], and H projected on it, float64 [k, k]."""
        steps = min(self.steps, len(b))
        generator = torch.Generator().manual_seed(self.seed)
        basis = torch.zeros(len(b), steps, dtype=b.dtype, device=b.device)
        projected = torch.zeros(steps, steps, dtype=torch.float64, device=b.device)
        vector, largest = _orthogonal_vector(basis[:, :0], generator), 0.0
        for step in range(steps):
            basis[:, step : step + 1] = vector
            pushed = curvature.product(vector)
            largest = max(largest, float(column_norms(pushed)[0]))
            for _ in range(2):
                parts = basis[:, : step + 1].T @ pushed
                projected[: step + 1, step] += parts[:, 0].double()
                pushed = pushed - basis[:, : step + 1] @ parts
            left = column_norms(pushed)
            if step + 1 == steps:
                break
            if float(left[0]) <= 100 * torch.finfo(b.dtype).eps * largest:
                # The space is closed under H, as it is early where eigenvalues are equal: go on outside of it.
                vector = _orthogonal_vector(basis[:, : step + 1], generator)
            else:
                projected[step + 1, step] = left[0]
                vector = pushed / left.to(b.dtype)
        return basis, projected


def _orthogonal_vector(basis: Tensor, generator: torch.Generator) -> Tensor:
    """A random unit vector [P, 1] orthogonal to the columns of [P, k]."""
    vector = torch.randn(len(basis), 1, generator=generator, dtype=torch.float64).to(basis)
    for _ in range(2):
        vector = vector - basis @ (basis.T @ vector)
    return vector / column_norms(vector).to(basis.dtype)
