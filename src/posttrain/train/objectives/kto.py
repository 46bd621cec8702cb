"""Kahneman-Tversky optimisation: answers that are desirable or not, in no pairs."""

import torch
from torch import Tensor

from posttrain.train.objectives.config import KtoConfig
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sequence_log_probs import SequenceLogProbs, log_ratios


def kto(
    policy: SequenceLogProbs, reference: SequenceLogProbs, desirable: Tensor, kl: Tensor, config: KtoConfig
) -> Loss:
    """Weight times 1 - sigmoid(beta (h - kl)) for a desirable answer, 1 - sigmoid(beta (kl - h)) for another.

    K. Ethayarajh et al., KTO: Model Alignment as Prospect Theoretic Optimization, 2024, arXiv:2402.01306,
    equation 7 (TRL: KTOTrainer, ``kto``). h = ln pi(y|x)/ref(y|x) is an answer's log-ratio. The mean is over
    answers, not over their weights.

    Args:
        desirable: bool [N].
        kl: scalar float32, ``kl_estimate`` of the whole optimiser step; below 0 it counts as 0, and it gets no
            gradient.

    Raises:
        ValueError: the answers, the reference and the marks are not equally many.
    """
    ratios = log_ratios(policy, reference)
    if desirable.shape != ratios.shape:
        raise ValueError(f"{list(desirable.shape)} marks do not go with {len(policy)} answers")
    kl = kl.detach().clamp(min=0)
    gains = torch.where(desirable, ratios - kl, kl - ratios)
    weights = torch.full_like(ratios, config.undesirable_weight).masked_fill(desirable, config.desirable_weight)
    losses = weights * torch.sigmoid(-config.beta * gains)  # 1 - sigmoid(x), without losing digits
    return Loss(losses.sum(), float(len(policy)), _metrics(policy.sums, config.beta * ratios, desirable, kl))


def kl_estimate(policy: SequenceLogProbs, reference: SequenceLogProbs) -> Tensor:
    """Scalar float32 without graph: KTO's point of reference z0, at least 0, nats.

    The mean log-ratio of mismatched pairs (each prompt with another's answer), as the paper and TRL estimate it.

    Args:
        policy, reference: all mismatched pairs of an optimiser step, so that how it is cut does not matter. TRL
            takes one micro-batch's.
    """
    ratios = log_ratios(policy, reference).detach()
    return (ratios.sum() / max(len(policy), 1)).clamp(min=0)


def _metrics(logps: Tensor, rewards: Tensor, desirable: Tensor, kl: Tensor) -> dict[str, tuple[Tensor, float]]:
    good = float(desirable.sum())
    metrics = {"kl": (kl * len(rewards), float(len(rewards)))}
    for name, mask, count in (("chosen", desirable, good), ("rejected", ~desirable, len(rewards) - good)):
        metrics[f"rewards/{name}"] = (rewards.detach().where(mask, 0.0).sum(), count)
        metrics[f"logps/{name}"] = (logps.detach().where(mask, 0.0).sum(), count)
    return metrics
