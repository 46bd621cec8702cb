"""Log-probabilities of sequences, and the lesson that needs nothing else."""

from collections.abc import Sequence

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
    """``sft``: every supervised token counts alike."""

    def begin(self, lm: LanguageModel, parts: Sequence[Sequence[int]]) -> float:
        """The step's supervised tokens."""
        rows = (row for part in parts for row in part)
        return float(sum(supervised_tokens(sequence) for row in rows for sequence in self.units[row]))

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        if not (self.settings and self.settings.label_smoothing):
            return self.function(sequences(lm, packed), self.settings)
        found, mean = token_and_mean_log_probabilities(lm, read(lm, packed), packed.targets)
        mean_sums = by_sequence(mean, packed).sums
        return self.function(by_sequence(found, packed), self.settings, mean_sums=mean_sums)


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
