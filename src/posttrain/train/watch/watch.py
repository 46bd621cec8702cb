"""All detectors over one training, and the decisions taken."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.train.watch.config import WatchConfig
from posttrain.train.watch.detectors import Detector, after_step, before_step
from posttrain.train.watch.findings import Decision, Finding
from posttrain.train.watch.policies import decide
from posttrain.train.watch.values import Measured, StepValues

log = logging.getLogger("posttrain")


class Watch:
    """Asked twice a step: `before_step` once the gradient is there, `observe` when the step is over.

    Each decision is logged as one line and kept in ``decisions``, oldest first. Steps that a loss scaler drops for
    overflow are not to be asked about: an infinite gradient is what it works with.

    Args:
        can_go_back: tells whether there is a checkpoint.
    """

    def __init__(self, config: WatchConfig, can_go_back: Callable[[], bool] = lambda: True) -> None:
        self.config = config
        self._can_go_back = can_go_back
        self.decisions: list[Decision] = []
        self.told: dict[int, list[Decision]] = {}
        self._start()

    def before_step(self, loss: float, grad_norm: float, supervised_tokens: int, step: int) -> Decision | None:
        """What to do before the optimiser steps; None for nothing.

        A batch without a supervised token, then NaN or infinity, then a gradient explosion are looked for, and the
        first that calls for more than a warning decides.
        """
        values = Measured(step=step, loss=loss, grad_norm=grad_norm, supervised_tokens=supervised_tokens)
        warning = None
        for detector in self._before:
            if (finding := detector.observe(values)) is not None:
                decision = self._decide(finding)
                if decision.action != "warn":
                    return decision
                warning = warning or decision
        return warning

    def observe(self, values: StepValues) -> list[Decision]:
        """What to do after a step, the gravest first."""
        found = [finding for detector in self._after if (finding := detector.observe(values)) is not None]
        return sorted((self._decide(finding) for finding in found), key=lambda decision: -decision.gravity)

    def tell(self, step: int, decisions: Sequence[Decision]) -> None:
        """Keep in ``told`` what is written with a step's values, so that it can be written again."""
        if decisions:
            self.told[step] = list(decisions)

    def state(self) -> dict[str, Any]:
        """All that the next decisions depend on, and what was told of those before, as JSON."""
        return {
            "detectors": {one.kind: one.state() for one in self._detectors()},
            "decisions": self.report(),
            "told": {str(step): [one.to_json() for one in decisions] for step, decisions in self.told.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken: for a training that is resumed."""
        self.decisions = [Decision.from_json(decision) for decision in state["decisions"]]
        self.rolled_back(state)

    def rolled_back(self, state: dict[str, Any]) -> None:
        """Go on from an earlier `state` within a training: what was measured since is forgotten, decisions are not."""
        for detector in self._detectors():
            detector.load(state["detectors"][detector.kind])
        told = state.get("told", {})  # a fork may go on with a checkpoint of before it was kept
        self.told = {int(step): [Decision.from_json(one) for one in decisions] for step, decisions in told.items()}

    def new_stage(self) -> None:
        """Forget what was measured, not the decisions: other data has another loss."""
        self._start()

    def report(self) -> list[dict[str, Any]]:
        """All decisions as JSON, oldest first."""
        return [decision.to_json() for decision in self.decisions]

    def _start(self) -> None:
        self._before, self._after = before_step(self.config), after_step(self.config)

    def _detectors(self) -> tuple[Detector[Any], ...]:
        return (*self._before, *self._after)

    def _decide(self, finding: Finding) -> Decision:
        decision = decide(finding, self.config, self.decisions, can_go_back=self._can_go_back())
        self.decisions.append(decision)
        log.warning("%s", decision.line())
        return decision
