"""TRAK: leave-one-out scores of a logistic regression on projected gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.attribution.influence.functional_model import Batch, FunctionalModel
from posttrain.attribution.influence.gradients import GradientMode, check_records, projected_gradients, record_blocks
from posttrain.attribution.influence.ihvp.solver import check_damping
from posttrain.attribution.influence.losses import IGNORE_INDEX, CrossEntropy
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.values import InfluenceScores
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Margin:
    """The negative log-odds of the right class, log((1 - p) / p), of what `CrossEntropy` takes; summed over positions.

    S. Park et al. 2023 (arXiv:2303.14186, equation 10): the output that their logistic regression is linear in.
    """

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        targets = batch[-1]
        # Not `one_hot`: it checks the range of its numbers, and vmap refuses to look at them.
        right = torch.arange(outputs.shape[-1], device=targets.device) == targets.clamp(min=0).unsqueeze(-1)
        chosen = outputs.masked_fill(~right, 0).sum(-1)
        others = outputs.masked_fill(right, -torch.inf).logsumexp(-1)
        margins = torch.where(targets == IGNORE_INDEX, torch.zeros_like(chosen), others - chosen)
        return margins.flatten(1).sum(1) if margins.dim() > 1 else margins


def trak(
    models: Sequence[FunctionalModel],
    train: Sequence[Any],
    test: Sequence[Any],
    *,
    projection: Projection | None,
    damping: float = 0.0,
    newton: bool = False,
    folder: Path | None = None,
    block_size: int | None = None,
    mode: GradientMode = "auto",
) -> InfluenceScores:
    """Computes TRAK (S. Park et al. 2023, arXiv:2303.14186, equations 13 to 17, without the soft threshold).

    With the projected gradients F of the right class's log-odds, the score of training record i for test record j is
    f_j' (F'F + damping)^-1 f_i (1 - p_i): by how much leaving record i out lowers the log-odds of record j, up to a
    factor. Over several models, each with a projection of its own, the first three factors are averaged, and so is the
    last. A record of several positions takes the mean of their 1 - p, which is our reading and not the paper's.

    Args:
        models: the same network trained several times, on the same records or on halves of them; its loss is
            `CrossEntropy`.
        train: N training records.
        test: M test records.
        projection: projection of the gradients, with the first model's seed; None for none.
        damping: added to the diagonal of F'F; needed with fewer records than dimensions.
        newton: keep the weights p (1 - p) within F'F and the leverage, which TRAK leaves out. For logistic regression
            without a projection the scores are then the exact first Newton step towards each leave-one-out solution (D.
            Pregibon 1981), with ``damping`` the penalty on the summed loss.
        folder, block_size, mode: as `posttrain.attribution.influence.gradients.projected_gradients` takes them.

    Returns:
        Scores in log-odds, and the sums by model.

    Raises:
        UserError: there are no models or records, a loss is another, or F'F is singular.
    """
    check_damping(damping)
    check_records(train, test)
    if not models:
        raise UserError("there are no models", where="influence.models")
    if not all(isinstance(model.losses, CrossEntropy) for model in models):
        raise UserError("TRAK takes models whose loss is the cross-entropy", where="influence.losses")
    kernels, errors, evaluations = [], [], 0
    for number, model in enumerate(models):
        # A projection of its own for each model, so that averaging cancels the projections' noise, too.
        own_projection = replace(projection, seed=projection.seed + number) if projection else None
        margin = replace(model, losses=Margin())
        train_gradients, test_gradients = (
            projected_gradients(margin, records, own_projection, folder=folder, block_size=block_size, mode=mode)
            for records in (train, test)
        )
        evaluations += train_gradients.evaluations + test_gradients.evaluations
        error = _error_probabilities(model, train, block_size)
        kernels.append(
            _leave_one_out_kernel(train_gradients.rows.double(), test_gradients.rows.double(), error, damping, newton)
        )
        errors.append(error)
    mean_error = torch.stack(errors).mean(0)[:, None]
    by_model = torch.stack([(kernel * mean_error).sum(1) for kernel in kernels])
    scores = torch.stack(kernels).mean(0) * mean_error
    return InfluenceScores.from_scores(scores.numpy(), evaluations, by_model=by_model.numpy())


def _leave_one_out_kernel(train: Tensor, test: Tensor, error: Tensor, damping: float, newton: bool) -> Tensor:
    """Computes F (F'F + damping)^-1 F_test' of gradients [N, K] and [M, K]: float64 [N, M]."""
    weights = error * (1 - error) if newton else torch.ones_like(error)
    gram = train.T @ (weights[:, None] * train)
    gram.diagonal().add_(damping)
    lower, failed = torch.linalg.cholesky_ex(gram)
    # Rounding can let the factorisation of a singular matrix pass; its smallest pivot gives it away.
    if int(failed) or float(lower.diagonal().min()) ** 2 <= 1e-12 * float(gram.diagonal().max()):
        raise UserError(
            f"{len(train)} records do not fill {train.shape[1]} dimensions: the matrix of the gradients is singular",
            where="influence.damping",
            fix="raise it, or project to fewer dimensions",
        )
    solved = torch.cholesky_solve(test.T, lower)
    if not newton:
        return train @ solved
    leverage = weights * (train.T * torch.cholesky_solve(train.T, lower)).sum(0)
    return (train @ solved) / (1 - leverage)[:, None]


def _error_probabilities(model: FunctionalModel, records: Sequence[Any], block_size: int | None) -> Tensor:
    """Returns 1 - p of the right class, a mean over a record's positions: float64 [N]."""
    means = []
    for rows in record_blocks(model, len(records), block_size):
        batch = model.batch(records[rows])
        with torch.no_grad():
            outputs = model.outputs_at(model.parameters, batch).double()
        counted = batch[-1] != IGNORE_INDEX
        chosen = outputs.log_softmax(-1).gather(-1, batch[-1].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        error = -torch.expm1(chosen) * counted  # 1 - p keeps its digits where p is next to 1
        means.append(error / counted if error.dim() == 1 else error.flatten(1).sum(1) / counted.flatten(1).sum(1))
    return torch.cat(means).cpu()
