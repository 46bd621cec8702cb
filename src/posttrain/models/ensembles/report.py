"""Reports on an ensemble: score and cost of each model alone, of the ensemble, and a cascade's whole curve."""

from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.models.ensembles.cascade import can_answer, cascade_point, cost_curve, routing_point
from posttrain.models.ensembles.config import EnsembleConfig, FittedParameters
from posttrain.models.ensembles.members import MemberScores, MemberTexts


def describe_ensemble(
    config: EnsembleConfig,
    parameters: FittedParameters,
    members: MemberScores | MemberTexts,
    answered_by: npt.NDArray[np.int64],
    scores: npt.ArrayLike,
    metric: str,
    gate_cost: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Reports on an ensemble whose models answered all of N >= 1 records.

    Args:
        config: its file.
        parameters: its parameters.
        members: the models' answers.
        answered_by: int64 [N], number of the model that answered.
        scores: [M, N], of each model's answers; bool where they are right or wrong.
        metric: name of their mean.
        gate_cost: of a gate in free text, its seconds and FLOPs for a record.

    Returns:
        ``method``, ``metric``, ``models`` (a row each: ``model``, ``weight`` or ``threshold``, ``accuracy``, which is
        the mean score, ``seconds`` and ``flops`` a record), ``fitted`` (what the parameters rest on), of a cascade
        ``chosen`` (`cascade_point`) and ``curve`` (rows of `cost_curve`), and of a gate in free text ``chosen``
        (`routing_point`). Seconds are measured, so no two runs give the same.
    """
    values = np.asarray(scores, np.float64)
    seconds = members.seconds / values.shape[1]
    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(config.models):
        row: dict[str, Any] = {"model": entry.model}
        if config.method == "cascade":
            row["threshold"] = [*map(_threshold, parameters.thresholds), None][number]
        elif config.method != "gate":
            row["weight"] = parameters.weights[number]
        row |= {"accuracy": float(values[number].mean()), "seconds": float(seconds[number])}
        rows.append({**row, "flops": float(members.flops[number].mean())})
    report: dict[str, Any] = {"method": config.method, "metric": metric, "models": rows, "fitted": parameters.report}
    if config.method == "cascade":
        report["chosen"] = cascade_point(answered_by, parameters.thresholds, values, members.flops, seconds)
        report["curve"] = cost_curve(members.confidence, values, members.flops, seconds)
    elif gate_cost is not None:
        asked = np.arange(len(values))[:, None] == answered_by
        point = routing_point(answered_by, asked, values, members.flops, seconds)
        point["seconds"] += gate_cost[0]
        point["flops"] += gate_cost[1]
        report["chosen"] = point
    return report


def _threshold(value: float) -> float | None:
    return value if can_answer(value) else None
