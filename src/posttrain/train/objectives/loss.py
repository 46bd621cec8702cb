"""The result of an objective and the log-probabilities from which most are computed.

A loss is a sum and a count, never a mean, in float32 or better.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.models.head import predicting_states, token_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed

Metrics = Mapping[str, tuple[Tensor, float]]
"""Name to (sum, count): the sum a scalar without graph, on the model's device, so that nothing waits for it."""


@dataclass(frozen=True, eq=False)
class Loss:
    """One micro-batch's part of a loss; the mean over several is the sum of sums by the sum of counts.

    Args:
        sum: scalar float32 with its graph, in nats.
        count: divisor of the sum: supervised tokens, pairs, rows, or the rows' weights.
        metrics: the objective's other values.
    """

    sum: Tensor
    count: float
    metrics: Metrics = field(default_factory=dict)

    def plus(self, other: "Loss", weight: float = 1.0) -> "Loss":
        """Adds ``weight`` times another loss over the same rows.

        Raises:
            ValueError: the counts differ, so that their means do not add.
        """
        if self.count != other.count:
            raise ValueError(f"the counts differ: {self.count:g} and {other.count:g}")
        return Loss(self.sum + weight * other.sum, self.count, merge_metrics([self.metrics, other.metrics]))


def join_losses(losses: Sequence[Loss]) -> Loss:
    """Joins the losses of disjoint rows."""
    if not losses:
        raise ValueError("there is no loss to join")
    total = torch.stack([loss.sum for loss in losses]).sum()
    return Loss(total, sum(loss.count for loss in losses), merge_metrics(loss.metrics for loss in losses))


def merge_metrics(metrics: Iterable[Metrics]) -> dict[str, tuple[Tensor, float]]:
    """Adds the sums and counts of several losses' metrics, by name."""
    total: dict[str, tuple[Tensor, float]] = {}
    for loss_metrics in metrics:
        for name, (value, count) in loss_metrics.items():
            before, counted = total.get(name, (torch.zeros_like(value), 0.0))
            total[name] = before + value, counted + count
    return total


def mean_metrics(metrics: Metrics) -> dict[str, float]:
    """Returns each metric's mean; one with a count of 0 is left out."""
    # `item` waits for the device: once a step here, and not in every micro-batch.
    values = {name: value.item() / count for name, (value, count) in metrics.items() if count}
    if "rewards/margins" not in values and {"rewards/chosen", "rewards/rejected"} <= values.keys():
        # Rows that are not pairs (KTO) have no margin each: it is the difference of the mean rewards, as in TRL.
        values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
    return values


def weighted_count(weights: Tensor | None, rows: Sequence[int], counts: Sequence[int]) -> float:
    """Sums the counts of the units ``rows``, each times its weight.

    Args:
        weights: float64 [units]; None: 1 each.
    """
    if weights is None:
        return float(sum(counts))
    return float(weights[list(rows)] @ torch.tensor(counts, dtype=torch.float64))


def select_row_weights(weights: Tensor | None, rows: Sequence[int], like: Tensor) -> Tensor | None:
    """float32 [rows], the weights of some units, on the device of ``like``; None if all weights are 1."""
    return None if weights is None else weights[list(rows)].to(like.device, torch.float32)


def apply_row_weights(values: Tensor, row_weights: Tensor | None) -> Tensor:
    """Multiplys the values [N] by their rows' weights [N], if there are any.

    Raises:
        ValueError: there are not as many weights as values (they would be broadcast).
    """
    if row_weights is None:
        return values
    # A shape such as [N, 1] would be broadcast to [N, N], and train on a sum that means nothing.
    if row_weights.shape != values.shape:
        raise ValueError(f"{list(row_weights.shape)} weights do not go with {list(values.shape)} rows")
    return values * row_weights


def to_float32(values: Tensor) -> Tensor:
    """Converts to float32, and leave float64 as it is."""
    # Sums over the vocabulary and over tokens in 16 bits would lose all but two or three digits.
    return values if values.dtype == torch.float64 else values.float()


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
            shapes = f"{list(self.sums.shape)} and {list(self.counts.shape)}"
            raise ValueError(f"sums and counts must be vectors of one length, and are {shapes}")

    def __len__(self) -> int:
        return len(self.sums)

    def __getitem__(self, rows: slice | Tensor) -> "SequenceLogProbs":
        return SequenceLogProbs(self.sums[rows], self.counts[rows])

    @property
    def means(self) -> Tensor:
        """float32 [N], log-probability a token, nats; 0 where no token is supervised."""
        # A sequence cut within its prompt has no supervised token: 0 / 1, and not NaN.
        return self.sums / self.counts.clamp(min=1)

    @staticmethod
    def join(parts: Sequence["SequenceLogProbs"]) -> "SequenceLogProbs":
        """Concatenates the sequences of several micro-batches."""
        return SequenceLogProbs(torch.cat([part.sums for part in parts]), torch.cat([part.counts for part in parts]))


def log_ratios(policy: SequenceLogProbs, reference: SequenceLogProbs) -> Tensor:
    """float32 [N], log-probability under the policy less that under the reference, which gets no gradient.

    Raises:
        ValueError: their lengths differ (they would be broadcast).
    """
    check_same_length(policy, reference)
    return policy.sums - reference.sums.detach()


def check_same_length(first: SequenceLogProbs, second: SequenceLogProbs) -> None:
    """Raises a ValueError unless both have N sequences."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} sequences do not go with {len(second)}")


def sequence_log_probs(lm: LanguageModel, packed: Packed) -> SequenceLogProbs:
    """Computes the log-probabilities of a micro-batch's sequences, with their graph."""
    return sum_by_sequence(token_log_probabilities(lm, predicting_states(lm, packed), packed.targets), packed)


def sum_by_sequence(tokens: Tensor, packed: Packed, counted: Tensor | None = None) -> SequenceLogProbs:
    """Sums tokens' log-probabilities by sequence.

    Args:
        tokens: float32 [S], of a micro-batch's supervised tokens.
        counted: bool [S], which of them to sum; None: all.
    """
    owners = packed.sequence
    if counted is not None:
        tokens, owners = tokens[counted], owners[counted]
    # A loop over sequences would start a kernel for each.
    sums = tokens.new_zeros(packed.sequences).index_add(0, owners, tokens)
    return SequenceLogProbs(sums, torch.bincount(owners, minlength=packed.sequences))
