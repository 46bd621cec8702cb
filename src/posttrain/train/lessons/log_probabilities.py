"""Log-probabilities of sequences, and the lesson that needs nothing else."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.models.head import token_and_mean_log_probabilities, token_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.models.reading import read
from posttrain.train.lessons.base import Lesson
from posttrain.train.lessons.units import supervised_tokens
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.sequences import Sequences


class Supervised(Lesson):
    """``sft``: every supervised token of a unit counts alike."""

    def begin(self, lm: LanguageModel, parts: Sequence[Sequence[int]]) -> float:
        """The step's supervised tokens, by their units' weights."""
        rows = [row for part in parts for row in part]
        return self.counted(rows, [sum(map(supervised_tokens, self.units[row])) for row in rows])

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        mean_sums = None
        if self.settings and self.settings.label_smoothing:
            tokens, mean = token_and_mean_log_probabilities(lm, read(lm, packed), packed.targets)
            found, mean_sums = by_sequence(tokens, packed), by_sequence(mean, packed).sums
        else:
            found = sequences(lm, packed)
        weights = self.row_weights(rows, found.sums)
        return with_unit_losses(self.function(found, self.settings, mean_sums=mean_sums, row_weights=weights), found)


def with_unit_losses(loss: Loss, found: Sequences) -> Loss:
    """The loss with those of its units, of each of which one sequence is given."""
    return replace(loss, unit_losses=-found.means.detach())


def sequences(lm: LanguageModel, packed: Packed) -> Sequences:
    """Log-probabilities of a micro-batch's sequences, with their graph."""
    return by_sequence(token_log_probabilities(lm, read(lm, packed), packed.targets), packed)


def by_sequence(found: Tensor, packed: Packed, counted: Tensor | None = None) -> Sequences:
    """Tokens' log-probabilities added up by sequence.

    Args:
        found: float32 [S], of a micro-batch's supervised tokens.
        counted: bool [S], which of them to add up; all if left out.
    """
    owners = packed.sequence
    if counted is not None:
        found, owners = found[counted], owners[counted]
    sums = found.new_zeros(packed.sequences).index_add(0, owners, found)
    return Sequences(sums, torch.bincount(owners, minlength=packed.sequences))
