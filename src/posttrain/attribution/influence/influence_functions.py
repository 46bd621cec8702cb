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
from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.functional_model import FunctionalModel, batch_key
from posttrain.attribution.influence.gradients import GradientMode, check_records, projected_gradients, record_gradients
from posttrain.attribution.influence.ihvp.conjugate_gradient import ConjugateGradient
from posttrain.attribution.influence.ihvp.solver import Solver, check_damping
from posttrain.attribution.values import InfluenceScores
from posttrain.store.files import make_folder
from posttrain.store.hashing import digest

_VERSION = 1  # raise it when the same key would stand for other numbers


def influence_functions(
    model: FunctionalModel,
    train: Sequence[Any],
    test: Sequence[Any],
    *,
    damping: float,
    solver: Solver | None = None,
    folder: Path | None = None,
    block_size: int | None = None,
    mode: GradientMode = "auto",
) -> InfluenceScores:
    """Computes influence functions (P. W. Koh and P. Liang 2017, arXiv:1703.04730, equation 2).

    The score of training record i for test record j is g_j' (H + damping I)^-1 g_i / N: to first order, by how much the
    test record's loss rises when the training record is left out. With H the curvature of the mean training loss, the
    damping is the coefficient of the L2 penalty (half the squared norm) that training added to the mean loss; without
    one it stands in for training that stopped before the minimum.

    The test records' solutions are in memory together: a few times M P numbers.

    Args:
        model: the trained model and the loss.
        train: N training records.
        test: M test records.
        damping: added to H's diagonal, in units of the mean loss's curvature; 0 or more.
        solver: `ConjugateGradient` by default, which takes any model; `Ekfac` is 20 times as fast for linear layers.
        folder: caches the solutions, and the training records' products with them block by block, so that a killed run
            resumes and several processes share the products out among themselves; made if missing. None caches
            nothing.
        block_size: records at a time.
        mode: as `posttrain.attribution.influence.gradients.batch_gradients` takes it.

    Returns:
        Scores in the unit of the loss, with the residuals of the solver.

    Raises:
        UserError: there are no records, the damping is negative, or the solver cannot invert.
    """
    check_damping(damping)
    check_records(train, test)
    solver = solver or ConjugateGradient()
    curvature = Curvature(model, train, block_size)
    evaluations = 0

    def solve() -> np.ndarray:
        """Returns the solutions [P, M], and a last row with their residuals, NaN if there are none."""
        nonlocal evaluations
        b = torch.empty(model.size, len(test), dtype=model.dtype, device=model.device)
        for rows, gradients in record_gradients(model, test, block_size, mode):
            b[:, rows] = gradients.T
        solution = solver.solve(curvature, b, damping)
        evaluations = len(test) + curvature.evaluations
        residuals = np.full(len(test), np.nan) if solution.residuals is None else solution.residuals
        x = solution.x.to(model.dtype).cpu().numpy()
        # In one array, so that a kill cannot part the solutions from their residuals.
        return np.concatenate([x, residuals[None].astype(x.dtype)])

    if folder is None:
        solved = solve()
    else:
        make_folder(folder)
        settings = [_VERSION, model.key, str(model.dtype), repr(solver), "gauss_newton", damping]
        contents = [[batch_key(model.batch([record])) for record in records] for records in (train, test)]
        file = folder / f"{digest([*settings, *contents])}.solution"
        array = cached_array(file, (model.size + 1, len(test)), solve)
        assert array is not None  # it waits for other processes
        solved = array
    x, residuals = torch.from_numpy(solved[:-1]).to(model.device), solved[-1].astype(np.float64)
    # Projected onto the solutions, so that the training records' gradients are never all in memory.
    products = projected_gradients(model, train, _SolutionProjector(x), folder=folder, block_size=block_size, mode=mode)
    scores = products.rows.double().numpy() / len(train)
    return InfluenceScores.from_scores(
        scores, evaluations + products.evaluations, residuals=None if np.isnan(residuals).all() else residuals
    )


@dataclass(frozen=True, eq=False)
class _SolutionProjector:
    """Projects onto each of K directions, [P, K]."""

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
