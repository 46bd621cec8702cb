"""Estimates the gain of a batch before it is labelled, from the learning curve and the agreement of champions."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow.parquet as parquet

from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext
from posttrain.loop.history import candidate_results, finished_rounds, finished_states, parent_dataset
from posttrain.loop.score_files import SCORES
from posttrain.loop.state import RoundState
from posttrain.select.stopping import ExpectedGain, GainEstimate, cohen_kappa, estimate_gain, expected_gain
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.message import Message

log = logging.getLogger("posttrain")

STAGE = "select"
"""Name of the stage, under which a round's state has the estimate of its batch."""


def estimate_batch_gain(context: RoundContext, champion: str, scores: Artifact, labels: int) -> GainEstimate | None:
    """Estimates the gain of a batch of so many labels; returns None if an earlier round cannot be read.

    Args:
        context: The round that is about to request labels.
        champion: Id of the model that its candidate has to beat.
        scores: Present scores of the pool by the champion.
        labels: Number of labels in the batch.
    """
    try:
        so_far = candidate_results(context.workspace)
        main = next(iter(read_evaluation(context.path(so_far[-1].evaluation)).values()))
        label_counts = [result.labels for result in so_far]
        values = [result.value for result in so_far]
        parent = context.artifact(parent_dataset(context.workspace)).meta["counts"]["records"]
        shares = all(0 <= value <= 1 for value in values)
        unknown = (
            "" if shares else f"{main.paired} is not a share from 0 to 1, of which a learning curve could be drawn"
        )
        unknown = unknown or _why_off_the_curve(context, champion)
        expected = None
        if not unknown:
            expected = expected_gain(label_counts, values, len(main.predictions), parent + labels)
        return estimate_gain(
            context.config.select.stop, main.paired, labels, expected, _agreements(context, champion, scores), unknown
        )
    # An estimate is advice: a damaged artifact of an earlier round must not end this one.
    except DamagedArtifactError as error:
        log.warning("%s; the gain of further labels cannot be estimated", error)
        return None


def gain_to_json(estimate: GainEstimate) -> dict[str, Any]:
    """Converts an estimate to the JSON values that a round's row stores."""
    expected = estimate.expected
    gain = {"metric": estimate.metric, **asdict(expected)} if expected else None
    return {
        "labels": estimate.labels,
        "expected_gain": gain,
        "unknown": estimate.unknown or None,
        "agreements": list(estimate.agreements),
        "why_stop": estimate.why,
    }


def current_estimate(state: RoundState, champion: str | None) -> Mapping[str, Any] | None:
    """Returns the estimate of a round's batch; one without a forecast if another model came into service meanwhile.

    Args:
        state: The round's state.
        champion: Id of the model in service.
    """
    estimate: Mapping[str, Any] | None = state.results.get(STAGE)
    if estimate is None or state.decision is not None or state.champion == champion:
        return estimate
    unknown = "another model is in service since the batch was selected"
    return {**estimate, "expected_gain": None, "unknown": unknown}


def gain_sentence(values: Mapping[str, Any]) -> Message:
    """Puts an estimate from a round's row into words."""
    gain = values["expected_gain"]
    expected = ExpectedGain(**{name: gain[name] for name in gain if name != "metric"}) if gain else None
    metric = gain["metric"] if gain else ""
    return GainEstimate(metric, values["labels"], expected, (), None, values.get("unknown") or "").sentence


def _why_off_the_curve(context: RoundContext, champion: str) -> str:
    """Returns why the model in service is not the newest of the learning curve; "" if it is.

    A refused or withdrawn model stands off the curve that the others follow, as does the champion which it did not
    replace: the curve's rise from the one to the next says nothing about the other.
    """
    rounds = finished_rounds(context.workspace)
    newest = RoundState.from_row(rounds[-1])
    if newest.candidate == champion:
        return ""
    trained = [row.number for row in rounds if row.candidate == champion]
    name = f"round {trained[-1]}'s" if trained else "of no finished round"
    ends = {"refuse": "was refused", "rollback": "was refused, with a roll-back"}
    end = ends.get(newest.action or "", "is no longer in service")
    return f"the model in service is {name}, and round {rounds[-1].number}'s, the newest of the learning curve, {end}"


def _agreements(context: RoundContext, champion: str, scores: Artifact) -> list[float]:
    """Computes Cohen's kappa of successive champions on pool records that both scored, oldest first."""
    scored = [(state.champion, state.scores) for state in finished_states(context.workspace) if state.scores]
    kappas: list[float] = []
    previous: dict[str, str] = {}
    # Grouped by champion: after a refused candidate the next round's scores are of the same model and say nothing new.
    for _, same in groupby([*scored, (champion, scores.id)], key=itemgetter(0)):
        *_, (_, id) = same  # the latest of each champion
        table = parquet.read_table(context.path(id) / SCORES, columns=["id", "predicted"])
        now = {key: answer for key, answer in zip(*table.to_pydict().values(), strict=True) if answer is not None}
        kappa = cohen_kappa(previous, now)
        kappas += [] if kappa is None else [kappa]
        previous = now
    return kappas
