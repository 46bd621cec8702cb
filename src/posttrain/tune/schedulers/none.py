"""No scheduling: every trial runs to its end."""

from collections.abc import Mapping
from typing import Any, ClassVar

from posttrain.tune.schedulers.base import Decision, Promote, Scheduler, Start


class RunToEnd(Scheduler):
    """Starts trials one after another, and lets each run to its end.

    Args:
        max_resource: the step at which a trial is finished; None: it ends by itself.
    """

    several_objectives: ClassVar[bool] = True

    def __init__(self, max_resource: int | None = None) -> None:
        self.max_resource = max_resource

    def choose(self, can_start: bool = True) -> Start | Promote | None:
        return Start(self.max_resource) if can_start else None

    def started(self, number: int, resource: int | None, notes: Mapping[str, Any]) -> None:
        """Nothing depends on it."""

    def report(self, number: int, step: int, value: float) -> Decision:
        return Decision.STOP if self.max_resource is not None and step >= self.max_resource else Decision.CONTINUE

    def ended(self, number: int, value: float | None) -> None:
        """Nothing depends on it."""
