"""TracIn and LESS: products of training and test gradients, summed over the checkpoints of a training.

LESS takes Adam's update in place of the training gradient, and the cosine in place of the inner product.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.gradients import GradientMode, check_records, projected_gradients, record_gradients
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.values import InfluenceScores
from posttrain.store.errors import UserError

_CONVERGED_STEPS = 10**6  # so many that bias correction divides by 1


@dataclass(frozen=True, eq=False)
class AdamMoments:
    """Adam's moments, and the update that it would apply for one record alone.

    Attributes:
        first, second: its running means of the gradient and of its square, [P] in the model's order, not corrected.
        steps: number of steps so far.
        beta1, beta2, epsilon: its settings.
    """

    first: Tensor
    second: Tensor
    steps: int
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    @classmethod
    def from_records(cls, model: FunctionalModel, records: Sequence[Any], block_size: int | None = None) -> Self:
        """Estimates the moments of a training whose optimiser was not saved.

        They are the limit for batches of one of these records each at constant weights: the mean of the records'
        gradients and of their squares.

        Raises:
            UserError: there are no records, or a gradient is not finite.
        """
        # In float64: a running sum of many float32 gradients would drop the small ones.
        first = torch.zeros(model.size, dtype=torch.float64)
        second = torch.zeros_like(first)
        for _, gradients in record_gradients(model, records, block_size):
            first += gradients.sum(0, dtype=torch.float64).cpu()
            second += gradients.square().sum(0, dtype=torch.float64).cpu()
        first, second = ((total / len(records)).to(model.device, model.dtype) for total in (first, second))
        return cls(first, second, _CONVERGED_STEPS)

    def __call__(self, gradients: Tensor) -> Tensor:
        """Returns Adam's next update, over the learning rate, if each gradient of [B, P] were a batch's: [B, P].

        M. Xia et al. 2024 (arXiv:2402.04333, section 3.1).
        """
        first = (self.beta1 * self.first + (1 - self.beta1) * gradients) / (1 - self.beta1 ** (self.steps + 1))
        second = (self.beta2 * self.second + (1 - self.beta2) * gradients**2) / (1 - self.beta2 ** (self.steps + 1))
        # The paper has epsilon inside the root; torch, which trained the model, has it outside.
        return first / (second.sqrt() + self.epsilon)

    @cached_property
    def key(self) -> str:
        """Identifies the moments and settings."""
        checksum = hashlib.sha256(repr((self.steps, self.beta1, self.beta2, self.epsilon)).encode())
        for moment in (self.first, self.second):
            checksum.update(moment.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return checksum.hexdigest()


@dataclass(frozen=True, eq=False)
class TracInCheckpoint:
    """The parameters of a model at one point of its training.

    Attributes:
        parameters: parameters by name, the model's among them, such as ``model.state_dict()``; copied.
        rate: the learning rate there; the sum of several steps' if it stands for these.
        adam: Adam's moments there; LESS needs them.
    """

    parameters: Mapping[str, Tensor]
    rate: float
    adam: AdamMoments | None = None

    def __post_init__(self) -> None:
        # A state dict's tensors are the model's own, which training keeps changing.
        copied = {name: value.detach().clone() for name, value in self.parameters.items()}
        object.__setattr__(self, "parameters", copied)


def check_checkpoints(checkpoints: Sequence[TracInCheckpoint]) -> None:
    """Raises a UserError unless there is a checkpoint and each has a learning rate above 0."""
    if not checkpoints:
        raise UserError("there are no checkpoints", where="influence.checkpoints")
    for number, checkpoint in enumerate(checkpoints, 1):
        if not 0 < checkpoint.rate < float("inf"):
            raise UserError(
                f"the learning rate of checkpoint {number} must be above 0, not {checkpoint.rate}",
                where="influence.checkpoints",
            )


def tracin(
    model: FunctionalModel,
    checkpoints: Sequence[TracInCheckpoint],
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
        projection: projection of the gradients; None for none.
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
    checkpoints: Sequence[TracInCheckpoint],
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
        projection: projection of the gradients, to 8,192 dimensions in the paper; None for none.
        groups: number of each test record's task, from 0 on; each task is a column of the scores then.
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
