"""An exponential moving average of the weights over the steps of a training."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Ema:
    """Float32 exponential moving averages of float32 master weights.

    Update n, counted from 0, is ``average += (1 - d) (weight - average)`` with d = min(decay, (1 + n) / (10 + n)), so
    that the weights that a training started from are soon forgotten. The average begins as a copy of the weights.

    Args:
        decay: share of the average that an update keeps.
        names: the weights' names in checkpoints.
        masters: the weights, float32; read at each update.
    """

    def __init__(self, decay: float, names: Sequence[str], masters: Sequence[Tensor]) -> None:
        self.decay = decay
        self.names, self.masters = list(names), list(masters)
        self.averages = [master.detach().clone() for master in masters]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Updates the averages; call it after every step of the optimiser."""
        # Warm-up of the average, as in TensorFlow's ExponentialMovingAverage with `num_updates`.
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.averages, self.masters, 1 - decay)
        self.updates += 1

    @torch.no_grad()
    def copy_to(self, weights: Sequence[Tensor]) -> None:
        """Copies the averages into a model's weights, rounded to their precision."""
        torch._foreach_copy_(list(weights), self.averages)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the averages by name, without a copy, and the number of updates."""
        averages = {f"ema.{name}": average for name, average in zip(self.names, self.averages, strict=True)}
        return averages | {"ema": torch.tensor(self.updates)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned; starts from the weights if a checkpoint has no averages."""
        if "ema" not in tensors:
            torch._foreach_copy_(self.averages, self.masters)
            self.updates = 0
            return
        for name, average in zip(self.names, self.averages, strict=True):
            average.copy_(tensors[f"ema.{name}"])
        self.updates = int(tensors["ema"])
