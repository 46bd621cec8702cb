"""What the triggers' rules are about, as it stands before a round."""

import math

from posttrain.loop.history import days_since_training, finished_rounds, known_inputs
from posttrain.loop.stages.collect import collect
from posttrain.loop.stages.evaluation import evaluate
from posttrain.loop.turn import Turn


def trigger_values(turn: Turn, champion: str, urgent: bool) -> dict[str, float]:
    """The values of the triggers' metrics.

    Args:
        turn: the round that may start.
        champion: id of the model in service.
        urgent: whether the user asked for a round.

    Returns:
        ``new_records``: pool records that the last round did not know; ``new_labels``: labelled records that the
        training set does not hold; ``days_since_training``; ``degradation``: how much the champion's main metric has
        fallen since its round, on the test set of today; ``urgent``: 1 or 0.
    """
    workspace = turn.workspace
    collected = collect(turn)
    rounds = finished_rounds(workspace)
    now = evaluate(turn, champion, collected.test).meta["metrics"]
    # A model that was promoted by hand out of an unfinished round has no figures of that time.
    then = next((entry.detail["metrics"] for entry in rounds if entry.candidate == champion), now)
    main = next(iter(rounds[0].detail["metrics"]))
    last = rounds[-1].detail
    return {
        "new_records": float(len(known_inputs(turn, collected.pool.id) - known_inputs(turn, last["pool"]))),
        "new_labels": float(len(known_inputs(turn, collected.labelled.id) - known_inputs(turn, last["carry"]))),
        "days_since_training": days_since_training(workspace),
        "degradation": then.get(main, math.nan) - now.get(main, math.nan),
        "urgent": float(urgent),
    }
