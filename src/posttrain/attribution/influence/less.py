"""LESS: the cosine of a training record's Adam update with a test record's gradient."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.attribution.influence.checkpoints import Checkpoint, check_checkpoints
from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.gradients import GradientMode, check_records, projected_gradients
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.values import InfluenceScores
from posttrain.store.errors import UserError


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
