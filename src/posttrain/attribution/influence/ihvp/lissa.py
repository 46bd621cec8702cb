"""The inverse by a Neumann series."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.ihvp.solver import (
    Solution,
    check_damping,
    column_norms,
    relative_residuals,
    warn_residuals,
)
from posttrain.store.errors import UserError
from posttrain.store.progress import Advance
from posttrain.store.progress import progress_bar as progress


@dataclass(frozen=True)
class Lissa:
    """LiSSA (N. Agarwal, B. Bullins and E. Hazan 2017, arXiv:1602.03943; for influence: Koh and Liang 2017, section 3).

    x <- b / s + x - (H + damping) x / s converges to the inverse's product if s, the scale, is above half the largest
    eigenvalue of H + damping, by a factor of 1 - (smallest eigenvalue) / s a step. With mini-batches each step takes
    the curvature of other records, and x is the mean of several repeats, each with noise of its own.

    Args:
        steps: of a repeat.
        batch: records a step; all when None, and then one repeat tells all.
        repeats: series whose mean is taken.
        scale: s; None: 1.1 times the largest eigenvalue, from 20 power iterations over all records, which mini-batches
            may exceed.
        seed: of the mini-batches and of the power iteration.
        tolerance: relative residual above which a warning is logged.
    """

    steps: int = 1000
    batch: int | None = None
    repeats: int = 1
    scale: float | None = None
    seed: int = 0
    tolerance: float = 1e-2

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """As `posttrain.attribution.influence.ihvp.solver.Solver` has it.

        Raises:
            UserError: the series diverges, or a number given is not positive.
        """
        check_damping(damping)
        if min(self.steps, self.repeats, 1 if self.batch is None else self.batch) < 1:
            raise UserError("steps, repeats and batch must be at least 1", where="influence.lissa")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise UserError(f"the scale must be above 0, not {self.scale}", where="influence.lissa.scale")
        scale = self.scale or 1.1 * (largest_eigenvalue(curvature, b, self.seed) + damping)
        repeats = self.repeats if self.batch is not None else 1
        total = torch.zeros_like(b)
        with progress("LiSSA", repeats * self.steps, "step") as advance:
            for repeat in range(repeats):
                total += self._series(curvature, b, damping, scale, repeat, advance)
        x = total / repeats
        found = relative_residuals(curvature, x, b, damping)
        # Of all records, the residuals of a series that converges never grow; those of mini-batches are noisy.
        if not np.isfinite(found).all() or (self.batch is None and found.max(initial=0.0) > 1):
            raise _diverged(scale)
        warn_residuals("LiSSA", found, self.tolerance, "allow more steps, larger batches or more repeats")
        return Solution(x, found)

    def _series(
        self, curvature: Curvature, b: Tensor, damping: float, scale: float, repeat: int, advance: Advance
    ) -> Tensor:
        generator = np.random.default_rng([self.seed, repeat])
        count = len(curvature.records)
        x = b / scale
        for step in range(self.steps):
            rows = None
            if self.batch is not None and self.batch < count:
                rows = np.sort(generator.choice(count, self.batch, replace=False))
            x = (b - curvature.product(x, rows) - damping * x) / scale + x
            # The sum of k terms that do not grow is at most k + 1 times the first.
            if step % 10 == 9 and not bool((column_norms(x) <= 100 * (step + 2) * column_norms(b) / scale).all()):
                raise _diverged(scale)
            advance(1)
        return x


def largest_eigenvalue(curvature: Curvature, b: Tensor, seed: int, steps: int = 20) -> float:
    """The largest eigenvalue of H in size, from below, by power iteration."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(len(b), 1, generator=generator, dtype=torch.float64).to(b)
    size = 0.0
    for _ in range(steps):
        vector = curvature.product(vector / column_norms(vector).to(b.dtype))
        size = float(column_norms(vector)[0])
        if size == 0:
            break
    return size


def _diverged(scale: float) -> UserError:
    return UserError(
        f"LiSSA diverges with scale {scale:.3g}",
        where="influence.lissa.scale",
        fix="raise it, or the damping; a curvature with negative eigenvalues needs the Gauss-Newton matrix",
    )
