"""The terms that objectives over pairs of a chosen and a rejected answer share."""

import torch.nn.functional as functional
from torch import Tensor

from posttrain.train.objectives.loss import Loss, SequenceLogProbs, apply_row_weights


def logistic(logits: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-ln P(the label is right), where a share ``label_smoothing`` of the labels is taken to be wrong.

    Args:
        logits: [N], log-odds that the chosen answer is the better one.
    """
    right = -functional.logsigmoid(logits)
    if label_smoothing == 0:
        return right
    return (1 - label_smoothing) * right - label_smoothing * functional.logsigmoid(-logits)


def pair_loss(
    losses: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    chosen_logps: Tensor | None = None,
    rejected_logps: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """The sum over N pairs with the metrics that TRL gives them; a tie of rewards is not a success.

    Metrics are those of the pairs as they are, whatever their weights.

    Args:
        losses: [N], nats.
        chosen_rewards, rejected_rewards: [N].
        chosen_logps, rejected_logps: [N], nats, where the rewards come from log-probabilities.
        row_weights: float32 [N], what each pair counts, in the sum and in the count; 1 each when left out.
    """
    chosen, rejected = chosen_rewards.detach(), rejected_rewards.detach()
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
    }
    if chosen_logps is not None and rejected_logps is not None:
        values |= {"logps/chosen": chosen_logps.detach(), "logps/rejected": rejected_logps.detach()}
    pairs = float(len(losses))
    count = pairs if row_weights is None else float(row_weights.sum())
    metrics = {name: (value.sum(), pairs) for name, value in values.items()}
    return Loss(apply_row_weights(losses, row_weights).sum(), count, metrics)


def split_pairs(sequences: SequenceLogProbs) -> tuple[SequenceLogProbs, SequenceLogProbs]:
    """Splits alternating sequences into the chosen and the rejected ones."""
    return sequences[slice(0, None, 2)], sequences[slice(1, None, 2)]
