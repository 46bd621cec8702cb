"""What an objective returns: sums and counts, never means, in float32 or better."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Metrics = Mapping[str, tuple[Tensor, float]]
"""Name to (sum, count): the sum a scalar without graph, on the model's device, so that nothing waits for it."""


@dataclass(frozen=True, eq=False)
class Loss:
    """One micro-batch's part of a loss; the mean over several is the sum of sums by the sum of counts.

    Args:
        sum: scalar float32 with its graph, in nats.
        count: what the sum is divided by: supervised tokens, pairs, rows, or the rows' weights.
        metrics: what else was measured.
        unit_losses: float32 [units] without graph, nats a supervised token of each unit, of a pair's chosen sequence;
            None where they are not read.
    """

    sum: Tensor
    count: float
    metrics: Metrics = field(default_factory=dict)
    unit_losses: Tensor | None = None

    def plus(self, other: "Loss", weight: float = 1.0) -> "Loss":
        """This loss and ``weight`` times another over the same rows.

        Raises:
            ValueError: the counts differ, so that their means do not add.
        """
        if self.count != other.count:
            raise ValueError(f"losses over {self.count:g} and {other.count:g} do not add")
        return Loss(self.sum + weight * other.sum, self.count, merge_metrics([self.metrics, other.metrics]))


def join_losses(losses: Sequence[Loss]) -> Loss:
    """The losses of disjoint rows as that of all of them."""
    if not losses:
        raise ValueError("there is no loss to join")
    total = torch.stack([one.sum for one in losses]).sum()
    return Loss(total, sum(one.count for one in losses), merge_metrics(one.metrics for one in losses))


def merge_metrics(metrics: Iterable[Metrics]) -> dict[str, tuple[Tensor, float]]:
    """The metrics of several losses as those of one: sums and counts added by name."""
    total: dict[str, tuple[Tensor, float]] = {}
    for one in metrics:
        for name, (value, count) in one.items():
            before, counted = total.get(name, (torch.zeros_like(value), 0.0))
            total[name] = before + value, counted + count
    return total


def mean_metrics(metrics: Metrics) -> dict[str, float]:
    """Each metric's mean; one that nothing was counted for is left out.

    Rows that are not pairs (KTO) have no margin each: theirs is the difference of the mean rewards.
    """
    found = {name: value.item() / count for name, (value, count) in metrics.items() if count}
    if "rewards/margins" not in found and {"rewards/chosen", "rewards/rejected"} <= found.keys():
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


def apply_row_weights(values: Tensor, row_weights: Tensor | None) -> Tensor:
    """The values [N], each times its row's weight [N]; as they are where there are no weights.

    Raises:
        ValueError: there are not as many weights as values (they would be broadcast).
    """
    if row_weights is None:
        return values
    if row_weights.shape != values.shape:
        raise ValueError(f"{list(row_weights.shape)} weights do not go with {list(values.shape)} rows")
    return values * row_weights


def to_float32(values: Tensor) -> Tensor:
    """The values in float32, or as they are in float64."""
    return values if values.dtype == torch.float64 else values.float()
