"""Influence methods by name, with settings for a handful of test records and the final weights only."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from posttrain.attribution.influence.curvature import Curvature
    from posttrain.attribution.influence.functional_model import FunctionalModel
    from posttrain.attribution.values import InfluenceScores

INFLUENCE_METHODS = ("ekfac", "conjugate_gradient", "tracin", "trak", "less")

_PROJECTION_DIMENSIONS = 4096
_DAMPING = 0.1  # of the mean eigenvalue, as R. Grosse et al. 2023 (arXiv:2308.03296, section 2.1)
_TRACE_RECORDS = 16  # records that the mean eigenvalue is estimated from


def influence_scores(
    model: "FunctionalModel",
    train: Sequence[Any],
    test: Sequence[Any],
    method: str,
    *,
    learning_rate: float,
    folder: Path,
) -> "InfluenceScores":
    """Computes the influence of training records on test records by a method's name.

    Args:
        model: the trained model and the loss.
        train: N training records.
        test: M test records.
        method: one of `INFLUENCE_METHODS`.
        learning_rate: of the training, for ``tracin`` and ``less``.
        folder: caches gradients and solutions, so that a killed call resumes.
    """
    from posttrain.attribution.influence.checkpoints import AdamMoments, Checkpoint
    from posttrain.attribution.influence.curvature import Curvature
    from posttrain.attribution.influence.ihvp.conjugate_gradient import ConjugateGradient
    from posttrain.attribution.influence.ihvp.ekfac import Ekfac
    from posttrain.attribution.influence.influence_functions import influence_functions
    from posttrain.attribution.influence.less import less
    from posttrain.attribution.influence.projection import Projection
    from posttrain.attribution.influence.tracin import tracin
    from posttrain.attribution.influence.trak import trak

    projection = Projection(_PROJECTION_DIMENSIONS)
    if method == "tracin":
        checkpoint = Checkpoint(model.parameters, learning_rate)
        return tracin(model, [checkpoint], train, test, projection=projection, folder=folder)
    if method == "less":
        checkpoint = Checkpoint(model.parameters, learning_rate, AdamMoments.from_records(model, train))
        return less(model, [checkpoint], train, test, projection=projection, folder=folder)
    if method == "trak":
        # With as many dimensions as records, the regression would fit each record exactly and tell none apart.
        narrow = Projection(max(8, min(_PROJECTION_DIMENSIONS, len(train) // 2)))
        return trak([model], train, test, projection=narrow, damping=1e-6, folder=folder)
    spread = np.linspace(0, len(train) - 1, min(_TRACE_RECORDS, len(train))).astype(int)
    mean = mean_eigenvalue(Curvature(model, [train[row] for row in spread]))
    # A model that is sure of everything has next to no curvature; without any damping the inverse would divide by it.
    damping = max(_DAMPING * mean, float(np.finfo(np.float32).tiny))
    # A rough solution is enough to rank records: the damping shapes the scores more than the last digits do.
    solver = Ekfac() if method == "ekfac" else ConjugateGradient(tolerance=1e-2, steps=50)
    return influence_functions(model, train, test, damping=damping, solver=solver, folder=folder)


def mean_eigenvalue(curvature: "Curvature", seed: int = 0) -> float:
    """Estimates the mean eigenvalue of a curvature, its trace by size, from a random vector of signs.

    M. F. Hutchinson 1990.
    """
    import torch

    model = curvature.model
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (model.size, 1), generator=generator).to(model.dtype).to(model.device) * 2 - 1
    trace = float((signs.double() * curvature.product(signs).double()).sum())
    return trace / model.size
