"""Reward models: one number an answer, learned from which of two is better."""

from torch import Tensor

from posttrain.train.objectives.config import RewardConfig
from posttrain.train.objectives.loss import Loss, to_float32
from posttrain.train.objectives.pairs import logistic, pair_loss


def reward(
    chosen: Tensor,
    rejected: Tensor,
    config: RewardConfig,
    *,
    margin: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """Bradley-Terry: -ln sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2.

    R. A. Bradley, M. E. Terry, Rank Analysis of Incomplete Block Designs, 1952; for language models L. Ouyang et
    al., 2022, arXiv:2203.02155, equation 1. The margin is that of H. Touvron et al., Llama 2, 2023,
    arXiv:2307.09288, equation 2; the centring term that of J. Eisenstein et al., Helping or Herding?, 2023,
    arXiv:2312.09244, equation 2. A mean over pairs, as TRL's RewardTrainer has it.

    Args:
        chosen, rejected: [N], the model's rewards.
        margin: [N], how much better the chosen answer is; 0 when left out.
        row_weights: float32 [N], what each pair counts, in the sum and in the count; 1 each when left out.

    Raises:
        ValueError: they are not vectors of one length.
    """
    chosen, rejected = to_float32(chosen), to_float32(rejected)
    if chosen.ndim != 1 or any(other.shape != chosen.shape for other in (rejected, margin) if other is not None):
        raise ValueError("chosen, rejected and margin are not vectors of one length")
    apart = chosen - rejected
    losses = logistic(apart if margin is None else apart - to_float32(margin))
    if config.centring:
        losses = losses + config.centring * (chosen + rejected).square()
    return pair_loss(losses, chosen, rejected, row_weights=row_weights)
