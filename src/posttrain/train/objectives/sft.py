"""Supervised fine-tuning."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from posttrain.models.head import predicting_states, token_and_mean_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.train.data.token_set import count_supervised
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.config import SftConfig
from posttrain.train.objectives.loss import (
    Loss,
    SequenceLogProbs,
    apply_row_weights,
    select_row_weights,
    sequence_log_probs,
    sum_by_sequence,
    weighted_count,
)

_SMALLEST_MISS = 1e-12


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

    With ``focal`` g, a sequence counts (1 - p)^g, p being the probability of its supervised tokens together (T. Lin et
    al., Focal Loss for Dense Object Detection, ICCV 2017, arXiv:1708.02002, equation 4, over whole answers). The
    divisor stays the number of tokens.

    Args:
        mean_sums: float32 [N], for each sequence the sum over its supervised tokens of the mean log-probability over
            the vocabulary, nats; needed with label smoothing.
        row_weights: float32 [N], what each sequence's tokens count, in the sum and in the count; 1 each when left out.

    Raises:
        ValueError: there is label smoothing and no ``mean_sums``, or not one a sequence.
    """
    smoothing = config.label_smoothing if config else 0.0
    count = float(apply_row_weights(sequences.counts, row_weights).sum())
    if config and config.focal:
        # `expm1`, since 1 - p of a learnt answer loses its digits. The floor: at p = 1 a fractional power has no slope.
        factor = (-torch.expm1(sequences.sums)).clamp_min(_SMALLEST_MISS) ** config.focal
        row_weights = factor if row_weights is None else row_weights * factor
    likelihood = -apply_row_weights(sequences.sums, row_weights).sum()
    if smoothing == 0:
        return Loss(likelihood, count)
    if mean_sums is None or mean_sums.shape != sequences.sums.shape:
        raise ValueError("label smoothing needs the mean log-probability over the vocabulary of each sequence")
    smoothed = (1 - smoothing) * likelihood - smoothing * apply_row_weights(mean_sums, row_weights).sum()
    return Loss(smoothed, count, {"nll": (likelihood.detach(), count)})


class SftObjective(Objective):
    """``sft``: every supervised token of a unit has the same weight."""

    formula: ClassVar[Callable[..., Loss]] = staticmethod(sft)

    def begin_step(self, lm: LanguageModel, groups: Sequence[Sequence[int]]) -> float:
        """Counts the step's supervised tokens, by their units' weights."""
        rows = [row for group in groups for row in group]
        return weighted_count(self.weights, rows, [sum(map(count_supervised, self.units[row])) for row in rows])

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        mean_sums = None
        if self.settings and self.settings.label_smoothing:
            states = predicting_states(lm, packed)
            tokens, mean = token_and_mean_log_probabilities(lm, states, packed.targets)
            log_probs, mean_sums = sum_by_sequence(tokens, packed), sum_by_sequence(mean, packed).sums
        else:
            log_probs = sequence_log_probs(lm, packed)
        weights = select_row_weights(self.weights, rows, log_probs.sums)
        loss = self.formula(log_probs, self.settings, mean_sums=mean_sums, row_weights=weights)
        return loss
