"""An exponential moving average of the weights over the steps of a training."""

from collections.abc import Mapping

import torch
from torch import Tensor

from posttrain.train.optim.weights import Weights
from posttrain.train.step_hooks import StepHook


class Ema(StepHook):
    """Float32 exponential moving averages of float32 master weights.

    Update n, counted from 0, is ``average += (1 - d) (weight - average)`` with d = min(decay, (1 + n) / (10 + n)), so
    that the weights that a training started from are soon forgotten. The average begins as a copy of the weights.

    Args:
        decay: share of the average that an update keeps.
        weights: the weights, read at each update.
    """

    def __init__(self, decay: float, weights: Weights) -> None:
        self.decay = decay
        self._weights, tensors = weights, weights.tensors()
        self.masters = [tensors[f"master.{name}"] for name in weights.names]
        self.averages = [master.clone() for master in self.masters]
        self.updates = 0

    @torch.no_grad()
    def updated(self, step: int, scale: float) -> None:
        """Updates the averages."""
        # Warm-up of the average, as in TensorFlow's ExponentialMovingAverage with `num_updates`.
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.averages, self.masters, 1 - decay)
        self.updates += 1

    def end(self) -> None:
        """Copies the averages into the weights: they are the result, and the last checkpoint keeps the weights."""
        averages = zip(self._weights.names, self.averages, strict=True)
        self._weights.load({f"master.{name}": average for name, average in averages})

    def tensors(self) -> dict[str, Tensor]:
        """Returns the averages by name, without a copy, and the number of updates."""
        averages = {f"ema.{name}": average for name, average in zip(self._weights.names, self.averages, strict=True)}
        return averages | {"ema": torch.tensor(self.updates)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned; starts from the weights if a checkpoint has no averages."""
        if "ema" not in tensors:
            torch._foreach_copy_(self.averages, self.masters)
            self.updates = 0
            return
        for name, average in zip(self._weights.names, self.averages, strict=True):
            average.copy_(tensors[f"ema.{name}"])
        self.updates = int(tensors["ema"])
