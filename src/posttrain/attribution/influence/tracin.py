"""TracIn: inner products of training and test gradients along the checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.attribution.influence.checkpoints import Checkpoint, check_checkpoints
from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.gradients import GradientMode, check_records, projected_gradients
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.values import InfluenceScores


def tracin(
    learner: FunctionalModel,
    checkpoints: Sequence[Checkpoint],
    train: Sequence[Any],
    test: Sequence[Any],
    *,
    projection: Projection | None = None,
    folder: Path | None = None,
    block: int | None = None,
    way: GradientMode = "auto",
) -> InfluenceScores:
    """TracInCP (G. Pruthi et al. 2020, arXiv:2002.08484, section 3.2).

    The score of training record i for test record j is the sum over checkpoints of the learning rate times the inner
    product of their gradients: to first order, by how much steps of plain gradient descent on record i alone lower the
    loss of record j. Without a projection all gradients of a checkpoint are in memory, (N + M) P numbers.

    Args:
        learner: the model and the loss.
        checkpoints: at least one, each with its learning rate.
        train: N training records.
        test: M test records.
        projection: of the gradients; none when None.
        folder, block, way: as `posttrain.attribution.influence.gradients.projected_gradients` takes them.

    Returns:
        Scores in the unit of the loss.

    Raises:
        UserError: there are no checkpoints or records, or one does not fit the model.
    """
    check_checkpoints(checkpoints)
    check_records(train, test)
    there = [learner.at(one.parameters) for one in checkpoints]
    scores, evaluations = np.zeros((len(train), len(test))), 0
    for one, placed in zip(checkpoints, there, strict=True):
        ours, theirs = (
            projected_gradients(placed, records, projection, folder=folder, block=block, way=way)
            for records in (train, test)
        )
        scores += one.rate * (ours.rows @ theirs.rows.T).double().numpy()
        evaluations += ours.evaluations + theirs.evaluations
    return InfluenceScores.of(scores, evaluations)
