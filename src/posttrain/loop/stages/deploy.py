"""Deploy: makes the candidate the champion, refuses it or rolls back, as the gate decided."""

import logging
from collections.abc import Mapping
from typing import Any

from posttrain.evaluate.metric_names import flat_gains
from posttrain.loop.context import RoundContext
from posttrain.loop.gate import broken_rules
from posttrain.loop.history import finished_rounds, finished_states, parent_dataset
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.record import RoundRecord, StageReport
from posttrain.loop.stage import RoundStep
from posttrain.loop.stages.decide import decision_reason, model_gains
from posttrain.loop.stages.evaluate import Evaluate, metrics_of
from posttrain.loop.state import RoundState
from posttrain.report.section import Text
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.message import Message

log = logging.getLogger("posttrain")


class Deploy(RoundStep):
    """Carries the decision out. A row of the registry is the outcome, so there is no artifact."""

    name = "deploy"
    title = Message("deploy")
    ends_round = True

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Changes the registry, unless it is done already, and determines the dataset that the next round builds on."""
        state, metadata = context.state, context.workspace.metadata
        registry = ModelRegistry(context.workspace, context.config.deploy)
        if context.number == 0:
            registry.promote(state.id("base"), round=0, action="baseline", reason="the base model")
            return context.update(candidate=state.base, decision={"action": "baseline"})
        candidate = state.id("candidate")
        assert state.decision is not None, "the gate decides before"
        action, reason = str(state.decision["action"]), decision_reason(state.decision)
        deployments = metadata.deployments()
        if action == "deploy":
            # Not again after a kill: a user who has rolled it back by hand since then meant it.
            if not any((entry.round, entry.model_id) == (context.number, candidate) for entry in deployments):
                registry.promote(candidate, round=context.number, reason=reason)
        # Once a round too: a second rollback would lead one champion further back.
        elif action == "rollback" and all(entry.round != context.number for entry in deployments):
            target = _rollback_target(context, registry)
            if target is None:
                log.warning("the gate requests a rollback, and no earlier champion passes gate.rollback")
                action = "refuse"
            else:
                registry.rollback(reason=reason, round=context.number, to=target)
        log.info("  %s: %s", action, reason)
        decision = {**state.decision, "action": action}
        discards_labels = action != "deploy" and _discards_labels(decision)
        # Only after the decision: the next round builds on these labels, unless they made the model surely worse.
        next_parent = parent_dataset(context.workspace) if discards_labels else state.dataset
        return context.update(decision=decision, discards_labels=discards_labels, next_parent=next_parent)

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports labels that are set aside."""
        sentence = Message("its model was refused, and its labels are set aside")
        return StageReport(blocks=[Text(sentence, "sentence")] if record.state.discards_labels else [])


def _rollback_target(context: RoundContext, registry: ModelRegistry) -> str | None:
    """Returns the newest earlier champion that breaks no rule of ``gate.rollback``; None if there is none."""
    state, decision = context.state, context.state.decision
    assert decision is not None, "the gate decides before"
    rounds = {row.candidate: row.number for row in finished_rounds(context.workspace)}
    for model in registry.earlier_champions():
        name = f"round {rounds[model]}" if model in rounds else model
        try:
            context.path(model)
        except DamagedArtifactError as error:
            log.warning("  %s cannot return: %s", name, error)
            continue
        # On the test set of today, as the champion; done already where the test set is that of its own round.
        evaluation = context.run(Evaluate(model, state.id("test"))).id
        metrics = {**_own_metrics(context, model), **metrics_of(context, evaluation, None, "")}
        gains = flat_gains(model_gains(context, evaluation, state.id("champion_evaluation")))
        measured = decision["metrics"]
        broken = broken_rules(context.config.gate, metrics, measured["champion"], measured["baseline"], gains)
        if not broken:
            return model
        log.info("  %s cannot return: %s", name, "; ".join(f"{rule.rule} ({rule.values})" for rule in broken))
    return None


def _own_metrics(context: RoundContext, model: str) -> Mapping[str, float]:
    """Returns the metrics that a model's own round measured, of which latency is not measured again."""
    states = [state for state in finished_states(context.workspace) if state.candidate == model]
    return (states[-1].metrics or {}) if states else {}


def _discards_labels(decision: Mapping[str, Any]) -> bool:
    """Returns True if a refused round's labels stay out of later training sets: its model is surely worse."""
    # Worse beyond chance: a batch that brought nothing is kept, as its labels are most likely right.
    return any(interval["high"] < 0 for interval in decision["intervals"].values())
