"""Layers that no gradient reaches."""

import math
from statistics import median
from typing import Any

from posttrain.train.watch.config import DeadLayersConfig
from posttrain.train.watch.findings import Finding, Kind
from posttrain.train.watch.values import StepValues


class DeadLayers:
    """Layer groups whose gradient norm is at most ``share`` of the groups' median, ``patience`` steps on end.

    A group is named once, and again only after it has come back. Steps with a norm that is not finite are left out.
    """

    kind: Kind = "dead_layers"

    def __init__(self, config: DeadLayersConfig) -> None:
        self._config = config
        self._steps: dict[str, int] = {}

    def observe(self, values: StepValues) -> Finding | None:
        norms = values.group_norms
        if not norms or not all(math.isfinite(norm) for norm in norms.values()):
            return None
        limit = self._config.share * median(norms.values())
        self._steps = {name: self._steps.get(name, 0) + 1 for name, norm in norms.items() if norm <= limit}
        dead = [name for name, steps in self._steps.items() if steps == self._config.patience]
        if not dead:
            return None
        what = f"next to no gradient for {self._config.patience} steps in {', '.join(dead)}"
        since = max(0, values.step - self._config.patience + 1)
        return Finding(self.kind, values.step, what, max(norms[name] for name in dead), limit, since)

    def state(self) -> dict[str, Any]:
        return {"steps": dict(self._steps)}

    def load(self, state: dict[str, Any]) -> None:
        self._steps = dict(state["steps"])
