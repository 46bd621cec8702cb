"""TracIn and LESS: products of training and test gradients, summed over the checkpoints of a training.

LESS takes Adam's update in place of the training gradient, and the cosine in place of the inner product.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.attribution.influence.checkpoints import AdamMoments, Checkpoint, check_checkpoints
from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.gradients import GradientMode, check_records, projected_gradients
from posttrain.attribution.influence.projection import DEFAULT_DIMENSIONS, Projection
from posttrain.attribution.values import InfluenceScores
from posttrain.store.errors import UserError


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


def less(
    model: FunctionalModel,
    checkpoints: Sequence[Checkpoint],
    train: Sequence[Any],
    test: Sequence[Any],
    *,
    projection: Projection | None,
    groups: Sequence[int] | None = None,
    folder: Path | None = None,
    block_size: int | None = None,
    mode: GradientMode = "auto",
) -> InfluenceScores:
    """Computes LESS (M. Xia et al. 2024, arXiv:2402.04333, definition 3.1 and section 4).

    The score of training record i for test record j is the sum over checkpoints of the learning rate times the cosine
    of Adam's update for record i with the gradient of record j, both projected. The paper averages the test records of
    a task and takes one cosine: `groups`.

    Args:
        model: the model, whose parameters that count are an adapter's, say, and the loss.
        checkpoints: each with its learning rate and Adam's moments.
        train: N training records.
        test: M test records.
        projection: of the gradients, 8,192 dimensions in the paper; None: none.
        groups: for each test record the number of its task, from 0 on; each task is a column of the scores then.
        folder, block_size, mode: as `posttrain.attribution.influence.gradients.projected_gradients` takes them.

    Returns:
        Scores in the unit of the learning rates, of at most their sum; 0 for a record whose gradient is 0.

    Raises:
        UserError: there are no checkpoints or records, a checkpoint has no moments or does not fit the model, or the
            groups are not one a test record.
    """
    check_checkpoints(checkpoints)
    check_records(train, test)
    models = [model.at(checkpoint.parameters) for checkpoint in checkpoints]
    for number, checkpoint in enumerate(checkpoints, 1):
        adam = checkpoint.adam
        if adam is None or adam.first.shape != (model.size,) or adam.second.shape != (model.size,):
            raise UserError(f"checkpoint {number} has no moments of Adam for the model", where="influence.checkpoints")
    mean = _group_means(groups, len(test))
    scores, evaluations = np.zeros((len(train), len(test) if mean is None else len(mean))), 0
    for checkpoint, at_checkpoint in zip(checkpoints, models, strict=True):
        updates = projected_gradients(
            at_checkpoint,
            train,
            projection,
            transform=checkpoint.adam,
            folder=folder,
            block_size=block_size,
            mode=mode,
        )
        gradients = projected_gradients(
            at_checkpoint, test, projection, folder=folder, block_size=block_size, mode=mode
        )
        rows = gradients.rows.double()
        targets = rows if mean is None else mean @ rows
        # Cosines, as the gradients of short answers are longer and would win any inner product.
        scores += checkpoint.rate * (_normalise(updates.rows.double()) @ _normalise(targets).T).numpy()
        evaluations += updates.evaluations + gradients.evaluations
    return InfluenceScores.from_scores(scores, evaluations)


def _group_means(groups: Sequence[int] | None, count: int) -> torch.Tensor | None:
    """Returns the matrix, float64 [G, M], that averages each group."""
    if groups is None:
        return None
    numbers = sorted(set(groups))
    if len(groups) != count or numbers != list(range(len(numbers))):
        raise UserError("groups must number each test record's task, from 0 on without gaps", where="influence.groups")
    member = torch.nn.functional.one_hot(torch.tensor(list(groups))).T.double()
    return member / member.sum(1, keepdim=True)


def _normalise(rows: torch.Tensor) -> torch.Tensor:
    sizes = rows.norm(dim=1, keepdim=True)
    return rows / torch.where(sizes > 0, sizes, 1)


def final_tracin(
    model: FunctionalModel, train: Sequence[Any], test: Sequence[Any], *, learning_rate: float, folder: Path
) -> InfluenceScores:
    """Computes TracIn at the final weights alone, as checkpoints of a finished training are not kept."""
    checkpoint = Checkpoint(model.parameters, learning_rate)
    return tracin(model, [checkpoint], train, test, projection=Projection(DEFAULT_DIMENSIONS), folder=folder)


def final_less(
    model: FunctionalModel, train: Sequence[Any], test: Sequence[Any], *, learning_rate: float, folder: Path
) -> InfluenceScores:
    """Computes LESS at the final weights alone, with Adam's moments estimated from the training records."""
    checkpoint = Checkpoint(model.parameters, learning_rate, AdamMoments.from_records(model, train))
    return less(model, [checkpoint], train, test, projection=Projection(DEFAULT_DIMENSIONS), folder=folder)
