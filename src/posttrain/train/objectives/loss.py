"""The result of an objective: sums and counts, never means, in float32 or better."""

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
        count: divisor of the sum: supervised tokens, pairs, rows, or the rows' weights.
        metrics: the objective's other values.
        unit_losses: float32 [units] without graph, nats a supervised token of each unit, of a pair's chosen sequence;
            None if they are not measured.
    """

    sum: Tensor
    count: float
    metrics: Metrics = field(default_factory=dict)
    unit_losses: Tensor | None = None

    def plus(self, other: "Loss", weight: float = 1.0) -> "Loss":
        """Add ``weight`` times another loss over the same rows.

        Raises:
            ValueError: the counts differ, so that their means do not add.
        """
        if self.count != other.count:
            raise ValueError(f"losses over {self.count:g} and {other.count:g} do not add")
        return Loss(self.sum + weight * other.sum, self.count, merge_metrics([self.metrics, other.metrics]))


def join_losses(losses: Sequence[Loss]) -> Loss:
    """Join the losses of disjoint rows."""
    if not losses:
        raise ValueError("there is no loss to join")
    total = torch.stack([loss.sum for loss in losses]).sum()
    return Loss(total, sum(loss.count for loss in losses), merge_metrics(loss.metrics for loss in losses))


def merge_metrics(metrics: Iterable[Metrics]) -> dict[str, tuple[Tensor, float]]:
    """Add the sums and counts of several losses' metrics, by name."""
    total: dict[str, tuple[Tensor, float]] = {}
    for loss_metrics in metrics:
        for name, (value, count) in loss_metrics.items():
            before, counted = total.get(name, (torch.zeros_like(value), 0.0))
            total[name] = before + value, counted + count
    return total


def mean_metrics(metrics: Metrics) -> dict[str, float]:
    """Return each metric's mean; one with a count of 0 is left out."""
    values = {name: value.item() / count for name, (value, count) in metrics.items() if count}
    if "rewards/margins" not in values and {"rewards/chosen", "rewards/rejected"} <= values.keys():
        # Rows that are not pairs (KTO) have no margin each: it is the difference of the mean rewards, as in TRL.
        values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
    return values


def apply_row_weights(values: Tensor, row_weights: Tensor | None) -> Tensor:
    """Multiply the values [N] by their rows' weights [N], if there are any.

    Raises:
        ValueError: there are not as many weights as values (they would be broadcast).
    """
    if row_weights is None:
        return values
    if row_weights.shape != values.shape:
        raise ValueError(f"{list(row_weights.shape)} weights do not go with {list(values.shape)} rows")
    return values * row_weights


def to_float32(values: Tensor) -> Tensor:
    """Convert to float32, and leave float64 as it is."""
    return values if values.dtype == torch.float64 else values.float()
