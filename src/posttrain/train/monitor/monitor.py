"""The monitor: runs the detectors over a training and decides what to do about their findings."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.train.monitor.decisions import POLICIES, Finding, MonitorDecision, Watch, decide
from posttrain.train.monitor.detectors import Detector, EarlyLimit, post_step_detectors, pre_step_detectors
from posttrain.train.monitor.metrics import GradientValues, StepValues

log = logging.getLogger("posttrain")

_DEFAULT_EARLY_LIMIT = EarlyLimit()


class Monitor:
    """Runs all detectors over a training and decides what to do about their findings.

    Call `before_step` once the gradient is summed, and `observe` after the step. Each decision is logged as one line
    and kept in ``decisions``, oldest first. Leave out steps that a loss scaler drops for overflow: it finds its
    scale by infinite gradients.

    Args:
        watch: names the policy; what it has no action for is not looked for.
        can_go_back: returns whether there is a checkpoint.
        early: limit of the loss in the first steps.
    """

    def __init__(
        self,
        watch: Watch = "normal",
        can_go_back: Callable[[], bool] = lambda: True,
        early: EarlyLimit = _DEFAULT_EARLY_LIMIT,
    ) -> None:
        self.policy = POLICIES[watch]
        self._early = early
        self._can_go_back = can_go_back
        self.decisions: list[MonitorDecision] = []
        self.reported: dict[int, list[MonitorDecision]] = {}
        """The decisions that were written with the metrics of a step, by step."""
        self.reset()

    def before_step(self, loss: float, grad_norm: float, supervised_tokens: int, step: int) -> MonitorDecision | None:
        """Decides before the optimiser steps; None if nothing is wrong.

        The first finding that calls for more than a warning decides.
        """
        values = GradientValues(step=step, loss=loss, grad_norm=grad_norm, supervised_tokens=supervised_tokens)
        warning = None
        for detector in self._before:
            if (finding := detector.observe(values)) is not None:
                decision = self._decide(finding)
                # A warning must not hide a later finding that keeps the gradient out of the weights.
                if decision.action != "warn":
                    return decision
                warning = warning or decision
        return warning

    def observe(self, values: StepValues) -> list[MonitorDecision]:
        """Decides after a step; the gravest decision first."""
        findings = [finding for detector in self._after if (finding := detector.observe(values)) is not None]
        return sorted((self._decide(finding) for finding in findings), key=lambda decision: -decision.gravity)

    def record(self, step: int, decisions: Sequence[MonitorDecision]) -> None:
        """Keeps the decisions that are written with a step's metrics, so that they can be written again."""
        if decisions:
            self.reported[step] = list(decisions)

    def state(self) -> dict[str, Any]:
        """Returns what the next decisions depend on, and all decisions so far, as JSON."""
        return {
            "detectors": {detector.kind: detector.state() for detector in self._detectors()},
            "decisions": self.report(),
            "reported": {
                str(step): [decision.to_json() for decision in decisions] for step, decisions in self.reported.items()
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned, decisions included: to resume."""
        self.decisions = [MonitorDecision.from_json(decision) for decision in state["decisions"]]
        self.roll_back(state)

    def roll_back(self, state: dict[str, Any]) -> None:
        """Restores the detectors from an earlier `state` of this training, and keeps the decisions since."""
        for detector in self._detectors():
            detector.load(state["detectors"][detector.kind])
        self.reported = {
            int(step): [MonitorDecision.from_json(decision) for decision in decisions]
            for step, decisions in state["reported"].items()
        }

    def reset(self) -> None:
        """Starts all detectors again, as for other data, which has another loss; decisions are kept."""
        # New objects rather than a reset of each: no detector can forget a field.
        self._before = [detector for detector in pre_step_detectors() if detector.kind in self.policy]
        self._after = [detector for detector in post_step_detectors(self._early) if detector.kind in self.policy]

    def report(self) -> list[dict[str, Any]]:
        """Returns all decisions as JSON, oldest first."""
        return [decision.to_json() for decision in self.decisions]

    def _detectors(self) -> tuple[Detector[Any], ...]:
        return (*self._before, *self._after)

    def _decide(self, finding: Finding) -> MonitorDecision:
        decision = decide(finding, self.policy, self.decisions, can_go_back=self._can_go_back())
        self.decisions.append(decision)
        log.warning("%s", decision.line())
        return decision
