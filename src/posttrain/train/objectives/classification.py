"""Sequence classification: one label of a closed set for a whole text."""

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.store.errors import UserError, suggest
from posttrain.train.objectives.config import ClassificationConfig
from posttrain.train.objectives.loss import Loss, apply_row_weights, to_float32


def classification(
    logits: Tensor,
    targets: Tensor,
    config: ClassificationConfig,
    *,
    weights: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """Cross-entropy over the labels, with label smoothing e: the target is (1-e) onehot + e / K.

    The smoothing is that of C. Szegedy et al., Rethinking the Inception Architecture, 2015, arXiv:1512.00567,
    section 7. With weights it is a weighted mean, divided by the weights of the rows' own labels, as in PyTorch.

    Args:
        logits: [N, K].
        targets: int64 [N], in 0..K-1.
        weights: float32 [K], as from ``label_weights``; 1 each when left out.
        row_weights: float32 [N], what each row counts beside that, in the sum and in the count; 1 each when left out.
    """
    logits = to_float32(logits)
    losses = functional.cross_entropy(
        logits,
        targets,
        None if weights is None else weights.to(logits),
        reduction="none",
        label_smoothing=config.label_smoothing,
    )
    total = apply_row_weights(losses, row_weights).sum()
    rows = float(len(targets))
    counts = torch.ones_like(losses) if weights is None else weights[targets].to(losses)
    count = float(apply_row_weights(counts, row_weights).sum())
    right = (logits.detach().argmax(-1) == targets).to(logits.dtype)
    return Loss(total, count, {"accuracy": (right.sum(), rows)})


def label_weights(labels: Sequence[str], config: ClassificationConfig, where: str | None = None) -> Tensor | None:
    """float32 [K], each label's weight; None when the config names none.

    Raises:
        UserError: a weight is given for something that is no label.
    """
    for name in config.label_weights:
        if name not in labels:
            raise UserError(f"no label `{name}` to weigh", where=where, fix=suggest(name, labels))
    if not config.label_weights:
        return None
    return torch.tensor([config.label_weights.get(label, 1.0) for label in labels])
