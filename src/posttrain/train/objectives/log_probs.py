"""Log-probabilities of sequences, and supervised fine-tuning on them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.models.head import token_and_mean_log_probabilities, token_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, predicting_states
from posttrain.train.data.units import count_supervised
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sequence_log_probs import SequenceLogProbs


class SftObjective(Objective):
    """``sft``: every supervised token of a unit counts alike."""

    def begin(self, lm: LanguageModel, parts: Sequence[Sequence[int]]) -> float:
        """The step's supervised tokens, by their units' weights."""
        rows = [row for part in parts for row in part]
        return self.counted(rows, [sum(map(count_supervised, self.units[row])) for row in rows])

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        mean_sums = None
        if self.settings and self.settings.label_smoothing:
            tokens, mean = token_and_mean_log_probabilities(lm, predicting_states(lm, packed), packed.targets)
            found, mean_sums = sum_by_sequence(tokens, packed), sum_by_sequence(mean, packed).sums
        else:
            found = sequence_log_probs(lm, packed)
        weights = self.row_weights(rows, found.sums)
        return add_unit_losses(self.function(found, self.settings, mean_sums=mean_sums, row_weights=weights), found)


def add_unit_losses(loss: Loss, found: SequenceLogProbs) -> Loss:
    """The loss with those of its units, of each of which one sequence is given."""
    return replace(loss, unit_losses=-found.means.detach())


def sequence_log_probs(lm: LanguageModel, packed: Packed) -> SequenceLogProbs:
    """Log-probabilities of a micro-batch's sequences, with their graph."""
    return sum_by_sequence(token_log_probabilities(lm, predicting_states(lm, packed), packed.targets), packed)


def sum_by_sequence(found: Tensor, packed: Packed, counted: Tensor | None = None) -> SequenceLogProbs:
    """Tokens' log-probabilities added up by sequence.

    Args:
        found: float32 [S], of a micro-batch's supervised tokens.
        counted: bool [S], which of them to add up; all if left out.
    """
    owners = packed.sequence
    if counted is not None:
        found, owners = found[counted], owners[counted]
    sums = found.new_zeros(packed.sequences).index_add(0, owners, found)
    return SequenceLogProbs(sums, torch.bincount(owners, minlength=packed.sequences))
