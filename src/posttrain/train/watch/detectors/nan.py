"""Numbers that are none."""

import math
from typing import Any

from posttrain.train.watch.findings import Finding, Kind
from posttrain.train.watch.values import Measured


class Nan:
    """A loss or a gradient norm that is NaN or infinite, at once. It has no false alarms."""

    kind: Kind = "nan"

    def observe(self, values: Measured) -> Finding | None:
        for name, value in (("loss", values.loss), ("gradient norm", values.grad_norm)):
            if not math.isfinite(value):
                return Finding(self.kind, values.step, f"{name} is {value}")
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass
