"""Influence functions: the change of a test record's loss when a training record is left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.attribution.array_cache import cached_array
from posttrain.attribution.influence.curvature import Curvature, CurvatureKind
from posttrain.attribution.influence.functional_model import FunctionalModel, batch_key
from posttrain.attribution.influence.gradients import GradientMode, check_records, projected_gradients, record_gradients
from posttrain.attribution.influence.ihvp.conjugate_gradient import ConjugateGradient
from posttrain.attribution.influence.ihvp.solver import Solver, check_damping
from posttrain.attribution.values import InfluenceScores
from posttrain.store.files import make_folder
from posttrain.store.hashing import digest

_VERSION = 1  # raised when the same key would stand for other numbers


def influence_functions(
    learner: FunctionalModel,
    train: Sequence[Any],
    test: Sequence[Any],
    *,
    damping: float,
    solver: Solver | None = None,
    curvature: CurvatureKind = "gauss_newton",
    folder: Path | None = None,
    block: int | None = None,
    way: GradientMode = "auto",
) -> InfluenceScores:
    """Influence functions (P. W. Koh and P. Liang 2017, arXiv:1703.04730, equation 2).

    The score of training record i for test record j is g_j' (H + damping I)^-1 g_i / N: to first order, by how much the
    test record's loss rises when the training record is left out. With H the curvature of the mean training loss, the
    damping is the coefficient of half the squared length of the parameters where training added that to the mean loss,
    and stands in for what training did not finish where it did not.

    The test records' solutions are in memory together, M times P numbers a few times over.

    Args:
        learner: the trained model and the loss.
        train: N training records.
        test: M test records.
        damping: what is added to H's diagonal, in units of the mean loss's curvature; 0 or more.
        solver: a way to invert; conjugate gradient by default.
        curvature: ``gauss_newton`` or ``hessian``, see `posttrain.attribution.influence.curvature.Curvature`.
        folder: keeps the solutions once they are found, and the training records' products with them block by block, so
            that what was killed goes on, and several processes share the products out among themselves; made if
            missing. None keeps nothing.
        block: records at a time.
        way: as `posttrain.attribution.influence.gradients.batch_gradients` takes it.

    Returns:
        Scores in the unit of the loss, with the residuals of the solver.

    Raises:
        UserError: there are no records, the damping is negative, or the solver cannot invert.
    """
    check_damping(damping)
    check_records(train, test)
    solver = solver or ConjugateGradient()
    matrix = Curvature(learner, train, curvature, block)
    taken = 0

    def solved() -> np.ndarray:
        """The solutions [P, M], and a last row with their residuals, NaN where there are none."""
        nonlocal taken
        wanted = torch.empty(learner.size, len(test), dtype=learner.dtype, device=learner.device)
        for rows, found in record_gradients(learner, test, block, way):
            wanted[:, rows] = found.T
        solution = solver.solve(matrix, wanted, damping)
        taken = len(test) + matrix.evaluations
        left = np.full(len(test), np.nan) if solution.residuals is None else solution.residuals
        x = solution.x.to(learner.dtype).cpu().numpy()
        return np.concatenate([x, left[None].astype(x.dtype)])

    if folder is None:
        both = solved()
    else:
        make_folder(folder)
        settings = [_VERSION, learner.key, str(learner.dtype), repr(solver), curvature, damping]
        contents = [[batch_key(learner.batch([record])) for record in records] for records in (train, test)]
        found = cached_array(
            folder / f"{digest([*settings, *contents])}.solution", (learner.size + 1, len(test)), solved
        )
        assert found is not None
        both = found
    x, residuals = torch.from_numpy(both[:-1]).to(learner.device), both[-1].astype(np.float64)
    products = projected_gradients(learner, train, _SolutionProjector(x), folder=folder, block=block, way=way)
    scores = products.rows.double().numpy() / len(train)
    return InfluenceScores.of(
        scores, taken + products.evaluations, residuals=None if np.isnan(residuals).all() else residuals
    )


@dataclass(frozen=True, eq=False)
class _SolutionProjector:
    """Products with each of K directions, [P, K]."""

    directions: Tensor

    @property
    def dimension(self) -> int:
        return self.directions.shape[1]

    @cached_property
    def _key(self) -> str:
        return batch_key((self.directions,))

    def __repr__(self) -> str:
        return f"onto {self._key}"

    def __call__(self, vectors: Tensor) -> Tensor:
        return vectors @ self.directions
