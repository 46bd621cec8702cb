"""Decide: the gate's rules over what was measured, and what follows from them."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.evaluate.metric_names import flat_gains, paired_gains
from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext
from posttrain.loop.gate import decide
from posttrain.store.artifacts import Artifact

DECISION = "decision.json"


def decision(
    turn: RoundContext,
    candidate: Mapping[str, Any],
    champion: Mapping[str, Any],
    baseline: Mapping[str, Any],
    latency: Artifact | None,
) -> dict[str, Any]:
    """The gate's decision.

    Args:
        turn: the round.
        candidate: its ``evaluation`` (artifact id) and ``metrics`` (by bare name); ``champion`` and
            ``baseline`` likewise.
        latency: the timing that the metrics come from.

    Returns:
        ``action``, ``collect_more``, ``rules``, ``intervals`` (by metric: difference, low, high, n) and the
        ``metrics`` of candidate, champion and baseline.
    """
    sides = {"candidate": candidate, "champion": champion, "baseline": baseline}

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        ours, theirs = (read_evaluation(turn.path(side["evaluation"])) for side in (candidate, champion))
        intervals = paired_gains(ours, theirs, turn.config.evaluate.bootstrap, turn.seed("decide"))
        found = decide(
            turn.config.gate,
            candidate["metrics"],
            champion["metrics"],
            baseline["metrics"],
            flat_gains(intervals),
        )
        record = {
            "action": found.action,
            "collect_more": found.collect_more,
            "rules": [verdict.as_dict() for verdict in found.verdicts],
            "intervals": {name: asdict(interval) for name, interval in intervals.items()},
            "metrics": {name: dict(side["metrics"]) for name, side in sides.items()},
        }
        (out / DECISION).write_text(json.dumps(record, indent=1), encoding="utf-8")
        return {"action": found.action}

    inputs = {name: str(side["evaluation"]) for name, side in sides.items()}
    inputs |= {"latency": latency.id} if latency else {}
    config = {
        "gate": turn.config.gate.model_dump(mode="json"),
        "bootstrap": turn.config.evaluate.bootstrap.model_dump(mode="json"),
        "metrics": {name: dict(side["metrics"]) for name, side in sides.items()},
    }
    artifact = turn.stage("decide", "decision", inputs, config, work)
    record = json.loads((turn.path(artifact.id) / DECISION).read_text(encoding="utf-8"))
    return {**record, "id": artifact.id}
