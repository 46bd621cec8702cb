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
    model: FunctionalModel,
    checkpoints: Sequence[Checkpoint],
    train: Sequence[Any],
    test: Sequence[Any],
    *,
    projection: Projection | None = None,
    folder: Path | None = None,
    block_size: int | None = None,
    mode: GradientMode = "auto",
) -> InfluenceScores:
    """Computes TracInCP (G. Pruthi et al. 2020, arXiv:2002.08484, section 3.2).

    The score of training record i for test record j is the sum over checkpoints of the learning rate times the inner
    product of their gradients: to first order, by how much steps of plain gradient descent on record i alone lower the
    loss of record j. Without a projection all gradients of a checkpoint are in memory, (N + M) P numbers.

    Args:
        model: the model and the loss.
        checkpoints: at least one, each with its learning rate.
        train: N training records.
        test: M test records.
        projection: of the gradients; no projection if None.
        folder, block_size, mode: as `posttrain.attribution.influence.gradients.projected_gradients` takes them.

    Returns:
        Scores in the unit of the loss.

    Raises:
        UserError: there are no checkpoints or records, or one does not fit the model.
    """
    check_checkpoints(checkpoints)
    check_records(train, test)
    # All of them before any work, so that a checkpoint that does not fit is reported at once.
    models = [model.at(checkpoint.parameters) for checkpoint in checkpoints]
    scores, evaluations = np.zeros((len(train), len(test))), 0
    for checkpoint, at_checkpoint in zip(checkpoints, models, strict=True):
        train_gradients, test_gradients = (
            projected_gradients(at_checkpoint, records, projection, folder=folder, block_size=block_size, mode=mode)
            for records in (train, test)
        )
        scores += checkpoint.rate * (train_gradients.rows @ test_gradients.rows.T).double().numpy()
        evaluations += train_gradients.evaluations + test_gradients.evaluations
    return InfluenceScores.from_scores(scores, evaluations)
