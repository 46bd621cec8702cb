"""Influence methods by name, with settings for a handful of test records and the final weights of a training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from posttrain.attribution import influence_functions, less, tracin, trak
from posttrain.attribution.influence.curvature import Curvature, mean_eigenvalue
from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.ihvp.conjugate_gradient import ConjugateGradient
from posttrain.attribution.influence.ihvp.ekfac import Ekfac
from posttrain.attribution.influence.projection import DEFAULT_DIMENSIONS, Projection
from posttrain.attribution.influence.tracin import AdamMoments, TracInCheckpoint
from posttrain.attribution.values import InfluenceScores

_DAMPING = 0.1  # of the mean eigenvalue, as R. Grosse et al. 2023 (arXiv:2308.03296, section 2.1)
_TRACE_RECORDS = 16  # records that the mean eigenvalue is estimated from


class InfluenceMethod(Protocol):
    """An influence method whose settings are chosen, so that it needs the trained model and the records alone."""

    def __call__(
        self, model: FunctionalModel, train: Sequence[Any], test: Sequence[Any], *, learning_rate: float, folder: Path
    ) -> InfluenceScores:
        """Computes the influence of training records on test records.

        Args:
            model: the trained model and the loss.
            train: N training records.
            test: M test records.
            learning_rate: learning rate of the training; the methods that sum over its steps use it.
            folder: caches gradients and solutions, so that a killed call resumes.
        """
        ...


def final_ekfac(
    model: FunctionalModel, train: Sequence[Any], test: Sequence[Any], *, learning_rate: float, folder: Path
) -> InfluenceScores:
    """Computes influence functions by EK-FAC, damped by a tenth of the mean eigenvalue."""
    damping = _default_damping(model, train)
    return influence_functions(model, train, test, damping=damping, solver=Ekfac(), folder=folder)


def final_conjugate_gradient(
    model: FunctionalModel, train: Sequence[Any], test: Sequence[Any], *, learning_rate: float, folder: Path
) -> InfluenceScores:
    """Computes influence functions by conjugate gradient, damped by a tenth of the mean eigenvalue."""
    # A rough solution is enough to rank records: the damping shapes the scores more than the last digits do.
    solver = ConjugateGradient(tolerance=1e-2, steps=50)
    return influence_functions(model, train, test, damping=_default_damping(model, train), solver=solver, folder=folder)


def _default_damping(model: FunctionalModel, train: Sequence[Any]) -> float:
    rows = np.linspace(0, len(train) - 1, min(_TRACE_RECORDS, len(train))).astype(int)
    mean = mean_eigenvalue(Curvature(model, [train[row] for row in rows]))
    # A model that is sure of everything has next to no curvature; without any damping the inverse would divide by it.
    return max(_DAMPING * mean, float(np.finfo(np.float32).tiny))


def final_tracin(
    model: FunctionalModel, train: Sequence[Any], test: Sequence[Any], *, learning_rate: float, folder: Path
) -> InfluenceScores:
    """Computes TracIn at the final weights alone, as checkpoints of a finished training are not kept."""
    checkpoint = TracInCheckpoint(model.parameters, learning_rate)
    return tracin(model, [checkpoint], train, test, projection=Projection(DEFAULT_DIMENSIONS), folder=folder)


def final_less(
    model: FunctionalModel, train: Sequence[Any], test: Sequence[Any], *, learning_rate: float, folder: Path
) -> InfluenceScores:
    """Computes LESS at the final weights alone, with Adam's moments estimated from the training records."""
    checkpoint = TracInCheckpoint(model.parameters, learning_rate, AdamMoments.from_records(model, train))
    return less(model, [checkpoint], train, test, projection=Projection(DEFAULT_DIMENSIONS), folder=folder)


def final_trak(
    model: FunctionalModel, train: Sequence[Any], test: Sequence[Any], *, learning_rate: float, folder: Path
) -> InfluenceScores:
    """Computes TRAK of one model, with at most half as many dimensions as records."""
    # With as many dimensions as records, the regression would fit each record exactly and tell none apart.
    projection = Projection(max(8, min(DEFAULT_DIMENSIONS, len(train) // 2)))
    return trak([model], train, test, projection=projection, damping=1e-6, folder=folder)


INFLUENCE_METHODS: Mapping[str, InfluenceMethod] = {
    "ekfac": final_ekfac,
    "conjugate_gradient": final_conjugate_gradient,
    "tracin": final_tracin,
    "trak": final_trak,
    "less": final_less,
}
