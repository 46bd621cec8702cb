"""Gradients far above the recent ones."""

import math
from collections import deque
from statistics import median
from typing import Any

from posttrain.train.watch.config import ExplosionConfig
from posttrain.train.watch.findings import Finding, Kind
from posttrain.train.watch.values import Measured

# Median absolute deviation of a normal distribution to its standard deviation.
_MAD_TO_DEVIATION = 1.4826


class Explosion:
    """A robust z-score of the logarithm of the gradient norm (Iglewicz & Hoaglin 1993), one-sided.

    ``z = (log g - median) / deviation`` over the last n <= ``window`` norms, with
    ``deviation = max(1.4826 MAD, floor) (1 + 8 / n)``: few norms say little, and beside constant ones anything would be
    an outlier. A norm that was found enters the window too: single ones do not move a median, and a new level is
    learned after half a window.

    False alarms with the default limits, in a million simulated steps: none where the logarithm is normal (deviation
    0.1 to 0.8); with heavier tails those far out are found as what they are: 13 with Student's t of 8 degrees of
    freedom, 125 with Laplace's, 202 with 5 degrees (scale 0.25 each).
    """

    kind: Kind = "explosion"

    def __init__(self, config: ExplosionConfig) -> None:
        self._config = config
        self._logs: deque[float] = deque(maxlen=config.window)

    def observe(self, values: Measured) -> Finding | None:
        if not (math.isfinite(values.grad_norm) and values.grad_norm > 0):
            return None
        finding = self._judge(values)
        self._logs.append(math.log(values.grad_norm))
        return finding

    def state(self) -> dict[str, Any]:
        return {"logs": list(self._logs)}

    def load(self, state: dict[str, Any]) -> None:
        self._logs = deque(state["logs"], maxlen=self._config.window)

    def _judge(self, values: Measured) -> Finding | None:
        count = len(self._logs)
        if count < self._config.warmup:
            return None
        middle = median(self._logs)
        spread = _MAD_TO_DEVIATION * median(abs(value - middle) for value in self._logs)
        limit = middle + self._config.z * max(spread, self._config.floor) * (1 + 8 / count)
        if math.log(values.grad_norm) <= limit:
            return None
        times = values.grad_norm / math.exp(middle)
        what = f"gradient norm {values.grad_norm:.3g} is {times:.3g} times the median of the last {count} steps"
        return Finding(self.kind, values.step, what, values.grad_norm, math.exp(limit))
