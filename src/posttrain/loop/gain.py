"""Estimates the gain of a batch before it is labelled, from the learning curve and the agreement of champions."""

import logging
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow.parquet as parquet

from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.context import RoundContext
from posttrain.loop.history import candidate_results, finished_states, parent_dataset
from posttrain.loop.score_files import SCORES
from posttrain.select.stopping import GainEstimate, cohen_kappa, estimate_gain, expected_gain
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import DamagedArtifactError

log = logging.getLogger("posttrain")


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
        expected = expected_gain(
            label_counts, values, len(main.predictions), parent + labels, _training_labels(context, champion, parent)
        )
        shares = all(0 <= value <= 1 for value in values)
        unknown = "" if shares else f"{main.paired} is no share from 0 to 1, of which a learning curve could be drawn"
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


def _training_labels(context: RoundContext, champion: str, parent: int) -> int:
    """Returns the number of labels that the champion was trained on; ``parent`` if no round trained it."""
    labels = {state.candidate: state.labels for state in finished_states(context.workspace)}
    return labels.get(champion) or parent


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
