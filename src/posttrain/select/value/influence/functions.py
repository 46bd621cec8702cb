"""Influence functions: what leaving a training record out does to a test record's loss."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.select.value.influence.curvature import Curvature, Kind
from posttrain.select.value.influence.gradients import Way, check_records, record_gradients
from posttrain.select.value.influence.inverse.conjugate_gradient import ConjugateGradient
from posttrain.select.value.influence.inverse.solution import Solver, check_damping
from posttrain.select.value.influence.learner import Learner
from posttrain.select.value.influence.scores import Scores
from posttrain.store.progress import task


def influence_functions(
    learner: Learner,
    train: Sequence[Any],
    test: Sequence[Any],
    *,
    damping: float,
    solver: Solver | None = None,
    curvature: Kind = "gauss_newton",
    block: int | None = None,
    way: Way = "auto",
) -> Scores:
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
        curvature: ``gauss_newton`` or ``hessian``, see `posttrain.select.value.influence.curvature.Curvature`.
        block: records at a time.
        way: as `posttrain.select.value.influence.gradients.batch_gradients` takes it.

    Returns:
        Scores in the unit of the loss, with the residuals of the solver.

    Raises:
        UserError: there are no records, the damping is negative, or the solver cannot invert.
    """
    check_damping(damping)
    check_records(train, test)
    matrix = Curvature(learner, train, curvature, block)
    wanted = torch.empty(learner.size, len(test), dtype=learner.dtype, device=learner.device)
    for rows, found in record_gradients(learner, test, block, way):
        wanted[:, rows] = found.T
    solution = (solver or ConjugateGradient()).solve(matrix, wanted, damping)
    x = solution.x.to(learner.dtype)
    scores = np.empty((len(train), len(test)))
    with task("taking gradients", len(train), "records") as advance:
        for rows, found in record_gradients(learner, train, block, way):
            scores[rows] = (found @ x).double().cpu().numpy()
            advance(len(found))
    evaluations = matrix.evaluations + len(train) + len(test)
    return Scores(scores / len(train), evaluations, solution.residuals)
