"""Adjust: applies the rules of ``adjust`` to a round's values, for the rounds after it."""

import json
import logging

import numpy as np

from posttrain.evaluate.metric_names import flat_gains
from posttrain.evaluate.paired_interval import Interval
from posttrain.loop.adjust import STAGE, Adjustment, adjust, adjustment_rules
from posttrain.loop.context import RoundContext
from posttrain.loop.history import finished_states, label_values
from posttrain.loop.record import RoundRecord, StageReport
from posttrain.loop.stage import RoundStep
from posttrain.loop.stages.decide import drift_of
from posttrain.loop.state import RoundState
from posttrain.store.message import Message
from posttrain.train.monitor.metrics import STEPS

log = logging.getLogger("posttrain")

_LEAST_STEPS = 8
"""Steps of a training from which its quarters say something."""


class AdjustConfig(RoundStep):
    """Decides what the next rounds change. The round's state records it, as it does the gate's decision."""

    name = STAGE
    title = Message("adjust")

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Applies the rules that hold."""
        if not context.config.adjust:
            return context.state
        adjustments = adjust(context.config, context.file_config or context.config, adjust_values(context))
        for adjustment in adjustments:
            log.log(logging.WARNING if adjustment.problem else logging.INFO, "  adjust: %s", adjustment.sentence)
        return context.state.with_result(cls.name, [adjustment.as_dict() for adjustment in adjustments])

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports what changes from the next round on."""
        sentences = [Adjustment(**fields).sentence for fields in record.state.results.get(cls.name, ())]
        return StageReport({"adjustments": sentences}, [Message("from then on, {change}", change=s) for s in sentences])


def adjust_values(context: RoundContext) -> dict[str, float]:
    """Returns the values that rules may use: those of the gate, of the training, and of the rounds so far."""
    decision = context.state.decision or {}
    measured = decision["metrics"]
    values: dict[str, float] = dict(measured["candidate"])
    for role in ("champion", "baseline"):
        values |= {f"{role}.{name}": value for name, value in measured[role].items()}
    values |= flat_gains({name: Interval(**fields) for name, fields in decision["intervals"].items()})
    names = {name for rule, _ in adjustment_rules(context.config.adjust) for name in rule.names}
    values |= label_values(context.workspace, context.config, names) | drift_of(context)
    actions = [*(state.action for state in finished_states(context.workspace)), decision["action"]]
    values["plateau"] = float(next(n for n, action in enumerate(actions[::-1]) if action in ("deploy", "baseline")))
    values["round"] = float(context.number)
    return values | _training_values(context)


def _training_values(context: RoundContext) -> dict[str, float]:
    """Returns the values of the round's training; without those that it was too short for."""
    candidate = context.state.id("candidate")
    last = context.artifact(candidate).meta.get("last_loss")
    values = {} if last is None else {"last_loss": float(last)}
    steps = json.loads((context.path(candidate) / STEPS).read_text(encoding="utf-8"))
    losses = np.array([step["loss"] for step in steps if step["loss"] is not None], np.float64)
    if len(losses) < _LEAST_STEPS:
        return values
    *_, third, fourth = np.array_split(losses, 4)
    values["loss_variance"] = float(fourth.var(ddof=1))
    if third.mean() > 0:
        values["loss_fall"] = float(1 - fourth.mean() / third.mean())
    return values
