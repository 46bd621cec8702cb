"""Log-probabilities of whole sequences, from which most objectives are computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.models.head import token_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, predicting_states
from posttrain.train.objectives.loss import Loss


@dataclass(frozen=True, eq=False)
class SequenceLogProbs:
    """Log-probabilities of the supervised tokens of N sequences.

    Args:
        sums: float32 [N], log-probability of the supervised tokens, nats.
        counts: int64 [N], supervised tokens.

    Raises:
        ValueError: the two are not vectors of one length.
    """

    sums: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        if self.sums.ndim != 1 or self.sums.shape != self.counts.shape:
            raise ValueError(f"sums {list(self.sums.shape)} and counts {list(self.counts.shape)} are no two vectors")

    def __len__(self) -> int:
        return len(self.sums)

    def __getitem__(self, rows: slice | Tensor) -> "SequenceLogProbs":
        return SequenceLogProbs(self.sums[rows], self.counts[rows])

    @property
    def means(self) -> Tensor:
        """float32 [N], log-probability a token, nats; 0 where no token is supervised."""
        return self.sums / self.counts.clamp(min=1)

    @staticmethod
    def join(parts: Sequence["SequenceLogProbs"]) -> "SequenceLogProbs":
        """Concatenate the sequences of several micro-batches."""
        return SequenceLogProbs(torch.cat([part.sums for part in parts]), torch.cat([part.counts for part in parts]))


def log_ratios(policy: SequenceLogProbs, reference: SequenceLogProbs) -> Tensor:
    """float32 [N], log-probability under the policy less that under the reference, which gets no gradient.

    Raises:
        ValueError: their lengths differ (they would be broadcast).
    """
    check_same_length(policy, reference)
    return policy.sums - reference.sums.detach()


def check_same_length(first: SequenceLogProbs, second: SequenceLogProbs) -> None:
    """Raise a ValueError unless both have N sequences."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} sequences do not go with {len(second)}")


def sequence_log_probs(lm: LanguageModel, packed: Packed) -> SequenceLogProbs:
    """Compute the log-probabilities of a micro-batch's sequences, with their graph."""
    return sum_by_sequence(token_log_probabilities(lm, predicting_states(lm, packed), packed.targets), packed)


def sum_by_sequence(tokens: Tensor, packed: Packed, counted: Tensor | None = None) -> SequenceLogProbs:
    """Sum tokens' log-probabilities by sequence.

    Args:
        tokens: float32 [S], of a micro-batch's supervised tokens.
        counted: bool [S], which of them to sum; None: all.
    """
    owners = packed.sequence
    if counted is not None:
        tokens, owners = tokens[counted], owners[counted]
    sums = tokens.new_zeros(packed.sequences).index_add(0, owners, tokens)
    return SequenceLogProbs(sums, torch.bincount(owners, minlength=packed.sequences))


def add_unit_losses(loss: Loss, log_probs: SequenceLogProbs) -> Loss:
    """Add each unit's own loss to a loss, from one sequence a unit."""
    # Detached and left on the device: reading it here would make every micro-batch wait for the device.
    return replace(loss, unit_losses=-log_probs.means.detach())
