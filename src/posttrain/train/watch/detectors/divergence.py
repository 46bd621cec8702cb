"""A loss that has turned back."""

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import Any

from posttrain.train.watch.config import DivergenceConfig
from posttrain.train.watch.findings import Finding, Kind
from posttrain.train.watch.values import StepValues

# Median of |a - b| to the standard deviation of a, for two independent normal values: 1.4826 / sqrt(2).
_DIFFERENCE_TO_DEVIATION = 1.0484
# Standard error of the median of n normal values: sqrt(pi / 2) of the mean's.
_MEDIAN_ERROR = 1.2533
# Windows of losses that the noise is estimated over.
_NOISE_WINDOWS = 4


class Divergence:
    """The running median of the loss is above its lowest by a margin, ``patience`` steps on end.

    The margin is the larger of ``rise max(|lowest|, first - lowest)`` and ``z`` standard errors of the median, the
    noise taken from the differences of successive losses, which a trend hardly touches (Rice 1984). A median, so
    that single bad batches count for nothing. As long as it lasts, it is found again every ``patience`` steps.

    A sudden rise is found after ``window // 2 + patience`` steps. False alarms with the default limits, in a million
    simulated steps of a flat loss: none with normal noise of 5% to 50%, none with log-normal noise of deviation 1.
    """

    kind: Kind = "divergence"

    def __init__(self, config: DivergenceConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=_NOISE_WINDOWS * config.window)
        self._first: float | None = None
        self._lowest = math.inf
        self._above = 0

    def observe(self, values: StepValues) -> Finding | None:
        if not math.isfinite(values.loss):
            return None
        self._losses.append(values.loss)
        if len(self._losses) < self._config.window:
            return None
        smooth = median(list(self._losses)[-self._config.window :])
        if self._first is None:
            self._first = smooth
        self._lowest = min(self._lowest, smooth)
        limit = self._lowest + self._margin(self._first)
        self._above = self._above + 1 if smooth > limit else 0
        if self._above < self._config.patience:
            return None
        self._above = 0
        patience = self._config.patience
        # A median turns half a window after what it is the median of.
        since = max(0, values.step - patience + 1 - self._config.window // 2)
        what = f"smoothed loss {smooth:.4g} after {self._lowest:.4g}, above {limit:.4g} for {patience} steps"
        return Finding(self.kind, values.step, what, smooth, limit, since)

    def state(self) -> dict[str, Any]:
        lowest = None if self._first is None else self._lowest
        return {"losses": list(self._losses), "first": self._first, "lowest": lowest, "above": self._above}

    def load(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=_NOISE_WINDOWS * self._config.window)
        self._first, self._above = state["first"], state["above"]
        self._lowest = math.inf if state["lowest"] is None else state["lowest"]

    def _margin(self, first: float) -> float:
        noise = _DIFFERENCE_TO_DEVIATION * median(abs(after - before) for before, after in pairwise(self._losses))
        error = _MEDIAN_ERROR * noise / math.sqrt(self._config.window)
        rise = self._config.rise * max(abs(self._lowest), first - self._lowest)
        return max(rise, self._config.z * error)
