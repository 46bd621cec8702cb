"""Supervised fine-tuning."""

from torch import Tensor

from posttrain.train.objectives.config import SftConfig
from posttrain.train.objectives.loss import Loss, apply_row_weights
from posttrain.train.objectives.sequence_log_probs import SequenceLogProbs


def sft(
    sequences: SequenceLogProbs,
    config: SftConfig | None = None,
    *,
    mean_sums: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """Negative log-likelihood of the supervised tokens, a mean over tokens, not sequences, as TRL has it.

    With ``label_smoothing`` e, a share e of each target is spread evenly over the vocabulary (C. Szegedy et al.,
    Rethinking the Inception Architecture for Computer Vision, 2016, arXiv:1512.00567, section 7), as in torch's
    ``cross_entropy``; what it is without is the metric ``nll``.

    Args:
        mean_sums: float32 [N], for each sequence the sum over its supervised tokens of the mean log-probability over
            the vocabulary, nats; needed with label smoothing.
        row_weights: float32 [N], what each sequence's tokens count, in the sum and in the count; 1 each when left out.

    Raises:
        ValueError: there is label smoothing and no ``mean_sums``, or not one a sequence.
    """
    smoothing = config.label_smoothing if config else 0.0
    count = float(apply_row_weights(sequences.counts, row_weights).sum())
    likelihood = -apply_row_weights(sequences.sums, row_weights).sum()
    if smoothing == 0:
        return Loss(likelihood, count)
    if mean_sums is None or mean_sums.shape != sequences.sums.shape:
        raise ValueError("label smoothing needs the mean log-probability over the vocabulary of each sequence")
    smoothed = (1 - smoothing) * likelihood - smoothing * apply_row_weights(mean_sums, row_weights).sum()
    return Loss(smoothed, count, {"nll": (likelihood.detach(), count)})
