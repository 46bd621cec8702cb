"""Batches that nothing can be learned from."""

from typing import Any

from posttrain.train.watch.findings import Finding, Kind
from posttrain.train.watch.values import Measured


class NoSupervised:
    """A step without a supervised token: its gradient is zero, and only decay and momentum would move the weights."""

    kind: Kind = "no_supervised"

    def observe(self, values: Measured) -> Finding | None:
        if values.supervised_tokens > 0:
            return None
        return Finding(self.kind, values.step, "the batch has no supervised token", values.supervised_tokens, 1)

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass
