"""Decide: applies the gate's rules to the measurements of candidate, champion and base model."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.evaluate.metric_names import flat_gains, paired_gains
from posttrain.evaluate.paired_interval import Interval
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext
from posttrain.loop.drift import DriftValues
from posttrain.loop.gate import decide
from posttrain.loop.history import finished_states, label_values
from posttrain.loop.model_registry import champion_before_round
from posttrain.loop.record import RoundRecord, StageReport
from posttrain.loop.stage import Stage
from posttrain.loop.stages.drift import MeasureDrift
from posttrain.loop.stages.evaluate import Evaluate, metrics_of
from posttrain.loop.state import RoundState
from posttrain.report.formatting import is_share, level_text, metric_name, points_text
from posttrain.report.section import Rules, blocks
from posttrain.store.message import Message

log = logging.getLogger("posttrain")

DECISION = "decision.json"


@dataclass(frozen=True)
class Measurement:
    """An evaluation of one model, and its metrics by bare name."""

    evaluation: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Decide(Stage):
    """Decides if the candidate is deployed or refused, or the champion rolled back.

    Args:
        candidate: Measurement of the candidate.
        champion: Measurement of the champion.
        baseline: Measurement of the base model.
        latency: Id of the timing that the metrics come from.
        other_values: Values of the quality of labels and of drift that the rules need and that are measured.
    """

    candidate: Measurement
    champion: Measurement
    baseline: Measurement
    latency: str | None
    other_values: Mapping[str, float] = field(default_factory=dict)
    name = "decide"
    title = Message("decide")
    kind = "decision"

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Judges the candidate against the champion of this moment."""
        # A user may promote or roll back by hand meanwhile: the candidate has to beat the model that it would replace.
        while True:
            stage = cls.from_context(context)
            artifact = context.run(stage)
            champion = champion_before_round(context.workspace, context.number)
            if champion == context.state.champion:
                record = json.loads((context.path(artifact.id) / DECISION).read_text(encoding="utf-8"))
                return context.update(decision={**record, "id": artifact.id})
            log.info("  another champion is in service now: judging again")
            context = context.with_state(champion=champion).after(Evaluate)

    @classmethod
    def report(cls, record: RoundRecord) -> StageReport:
        """Reports the rules with their values, and the gain."""
        rules = [
            (rule["rule"], rule["values"], rule["holds"]) for rule in (record.state.decision or {}).get("rules", [])
        ]
        gain = decided_gain(record)
        return StageReport(remark=gain.text if gain else "", blocks=blocks(Rules(rules)))

    @classmethod
    def from_context(cls, context: RoundContext) -> "Decide":
        """Builds the stage from the state's evaluations."""
        state = context.state
        candidate, champion, base = (state.id(f"{role}evaluation") for role in ("", "champion_", "base_"))
        first = finished_states(context.workspace)[0].metrics or {}
        # The base model is not timed again: its latency is that of round 0.
        base_metrics = {**first, **metrics_of(context, base, None, "")}
        names = context.config.gate.names
        others = {**label_values(context.workspace, context.config, names), **drift_of(context)}
        return cls(
            Measurement(candidate, state.metrics or {}),
            Measurement(champion, metrics_of(context, champion, state.latency, "champion")),
            Measurement(base, base_metrics),
            state.latency,
            {name: value for name, value in others.items() if name in names and not math.isnan(value)},
        )

    @property
    def measurements(self) -> dict[str, Measurement]:
        """Returns the measurements of the three models by their role."""
        return {"candidate": self.candidate, "champion": self.champion, "baseline": self.baseline}

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the evaluations and the latency measurement."""
        inputs = {role: measured.evaluation for role, measured in self.measurements.items()}
        return inputs | ({"latency": self.latency} if self.latency else {})

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the gate, the bootstrap and the metrics."""
        return {
            "other_values": dict(self.other_values),
            "gate": context.config.gate.model_dump(mode="json"),
            "bootstrap": context.config.evaluate.bootstrap.model_dump(mode="json"),
            # Not only the evaluations' ids: latencies come from another measurement.
            "metrics": {role: dict(measured.metrics) for role, measured in self.measurements.items()},
        }

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes ``decision.json``: action, rules, metrics, and intervals (difference, low, high, n) by metric."""
        intervals = model_gains(context, self.candidate.evaluation, self.champion.evaluation)
        metrics = {role: dict(measured.metrics) for role, measured in self.measurements.items()}
        decision = decide(
            context.config.gate,
            self.candidate.metrics,
            self.champion.metrics,
            self.baseline.metrics,
            {**flat_gains(intervals), **self.other_values},
        )
        record = {
            "action": decision.action,
            "collect_more": decision.collect_more,
            "rules": [rule.as_dict() for rule in decision.rules],
            "intervals": {name: asdict(interval) for name, interval in intervals.items()},
            "metrics": metrics,
        }
        (out / DECISION).write_text(json.dumps(record, indent=1), encoding="utf-8")
        return {"action": decision.action}


@dataclass(frozen=True)
class DecidedGain:
    """The candidate's gain over the champion with its interval, in the metric's own unit.

    Attributes:
        differing: Records of all ``n`` whose scores differ.
        metric: Name of the mean of the scores of ``n`` records, which need not be the main metric: models that are
            judged by perplexity are compared by log likelihood.
        level: Coverage of the interval, between 0 and 1.
    """

    difference: float
    low: float
    high: float
    n: int
    differing: int
    metric: str
    level: float

    @property
    def text(self) -> Message:
        """The gain in words: points for shares, other metrics in their own unit."""
        points = is_share(self.metric)
        values = {"difference": self.difference, "low": self.low, "high": self.high}
        shown = {
            name: points_text(value) if points else f"{value:+.3g}".replace("-", "−") for name, value in values.items()
        }
        shown |= {"metric": metric_name(self.metric), "level": level_text(self.level), "n": f"{self.n:,}"}
        shown |= {"differing": f"{self.differing:,}"}
        template = (
            "gain in {metric} over the champion: {difference} "
            "({level} interval {low} to {high}; {differing} of {n} records differ)"
        )
        if points:
            template = (
                "gain in {metric} over the champion: {difference} points "
                "({level} interval {low} to {high}; {differing} of {n} records differ)"
            )
        return Message(template, **shown)


def decided_gain(record: RoundRecord) -> DecidedGain | None:
    """Reads the gain by the main suite's scores that a round's decision saw."""
    decision = record.state.decision or {}
    if not decision.get("intervals"):
        return None
    metric, interval = next(iter(decision["intervals"].items()))
    # The config may have changed since: the level is that of the run that computed the interval.
    run = record.workspace.metadata.producers(decision["id"])[-1]
    return DecidedGain(**interval, metric=metric, level=run.config["bootstrap"]["level"])


def drift_of(context: RoundContext) -> dict[str, float]:
    """Returns the drift of a round's new inputs by its names in rules; empty where the round did not measure it."""
    id = context.state.outputs.get(MeasureDrift.name)
    return DriftValues.from_dict(context.artifact(id).meta).values if id else {}


def model_gains(context: RoundContext, evaluation: str, other: str) -> dict[str, Interval]:
    """Computes the intervals of one evaluation minus another, by name."""
    results = [read_evaluation(context.path(id)) for id in (evaluation, other)]
    return paired_gains(results[0], results[1], context.config.evaluate.bootstrap, context.seed("decide"))


def decision_reason(decision: Mapping[str, Any]) -> str:
    """Formats the rules that decided in one line."""
    deploys = decision["action"] == "deploy"
    sections = {"deploy": ("deploy",), "refuse": ("deploy", "rollback"), "rollback": ("rollback",)}[decision["action"]]
    rules = [rule for rule in decision["rules"] if rule["section"] in sections]
    # A refusal is due to a deployment rule that does not hold, or to a rollback rule that does.
    decisive = [rule for rule in rules if rule["holds"] == (deploys or rule["section"] == "rollback")]
    return "; ".join(f"{rule['rule']} ({rule['values']})" for rule in decisive)
