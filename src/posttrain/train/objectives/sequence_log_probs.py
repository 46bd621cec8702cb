"""Log-probabilities of whole sequences: what preference objectives are computed from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SequenceLogProbs:
    """What a model says of N sequences' supervised tokens.

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
        """The sequences of several micro-batches, one after the other."""
        return SequenceLogProbs(torch.cat([part.sums for part in parts]), torch.cat([part.counts for part in parts]))


def log_ratios(policy: SequenceLogProbs, reference: SequenceLogProbs) -> Tensor:
    """float32 [N], log-probability under the policy less that under the reference, which gets no gradient.

    Raises:
        ValueError: there are not as many of one as of the other (they would be broadcast).
    """
    check_same_length(policy, reference)
    return policy.sums - reference.sums.detach()


def check_same_length(first: SequenceLogProbs, second: SequenceLogProbs) -> None:
    """Raise a ValueError unless both have N sequences."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} sequences do not go with {len(second)}")
