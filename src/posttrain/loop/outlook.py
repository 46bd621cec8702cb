"""What the next batch is expected to bring, from the rounds so far."""

import logging
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow.parquet as parquet

from posttrain.evaluate.artifact import read_evaluation
from posttrain.loop.history import carried_dataset, finished_rounds
from posttrain.loop.stages.choose import SCORES
from posttrain.loop.standings import candidates
from posttrain.loop.turn import Turn
from posttrain.select.expected_gain import expected_gain
from posttrain.select.stopping import Outlook, kappa, outlook
from posttrain.store.artifacts import Artifact
from posttrain.store.errors import DamagedArtifact

log = logging.getLogger("posttrain")


def batch_size(turn: Turn) -> int:
    """Labels to ask for in this round: the config's, as far as its budget goes."""
    config = turn.config.label
    asked = sum(entry.detail.get("labels_new", 0) for entry in finished_rounds(turn.workspace))
    return config.per_round if config.budget is None else max(0, min(config.per_round, config.budget - asked))


def outlook_of(turn: Turn, champion: str, scores: Artifact, labels: int) -> Outlook | None:
    """What a batch of so many labels is expected to bring; None where the rounds before cannot be read.

    Args:
        turn: the round that is about to ask.
        champion: id of the model that its candidate has to beat.
        scores: the pool as the champion scores it now.
        labels: in the batch.
    """
    try:
        so_far = candidates(turn.workspace)
        main = next(iter(read_evaluation(turn.path(so_far[-1].evaluation)).values()))
        learned = [one.labels for one in so_far]
        values = [one.value for one in so_far]
        carried = turn.workspace.artifacts.get(carried_dataset(turn.workspace)).meta["counts"]["records"]
        expected = expected_gain(
            learned, values, len(main.predictions), carried + labels, _taught(turn, champion, carried)
        )
        shares = all(0 <= value <= 1 for value in values)
        unknown = "" if shares else f"{main.paired} is no share from 0 to 1, of which a learning curve could be drawn"
        return outlook(
            turn.config.select.stop, main.paired, labels, expected, _agreements(turn, champion, scores), unknown
        )
    except DamagedArtifact as error:
        log.warning("%s; what further labels will bring cannot be estimated", error)
        return None


def as_detail(found: Outlook) -> dict[str, Any]:
    """An outlook as a round's row keeps it."""
    one = found.expected
    gain = {"metric": found.metric, **asdict(one)} if one else None
    return {
        "labels": found.labels,
        "expected_gain": gain,
        "unknown": found.unknown or None,
        "agreements": list(found.agreements),
        "why_stop": found.why,
    }


def _taught(turn: Turn, champion: str, carried: int) -> int:
    """Labels that the champion has learned from; ``carried`` where it is of no round."""
    learned = {entry.candidate: int(entry.detail["labels"]) for entry in finished_rounds(turn.workspace)}
    return learned.get(champion, carried)


def _agreements(turn: Turn, champion: str, scores: Artifact) -> list[float]:
    """Cohen's kappa of successive champions on pool records that both scored, oldest first.

    Where a round's candidate was refused, the next one's scores are of the same model, and tell nothing new.
    """
    scored = [
        (entry.champion_before, str(entry.detail["scores"]))
        for entry in finished_rounds(turn.workspace)
        if "scores" in entry.detail
    ]
    found = []
    before: dict[str, str] = {}
    for _, same in groupby([*scored, (champion, scores.id)], key=itemgetter(0)):
        *_, (_, id) = same  # the latest of each champion
        table = parquet.read_table(turn.path(id) / SCORES, columns=["id", "predicted"])
        now = {key: answer for key, answer in zip(*table.to_pydict().values(), strict=True) if answer is not None}
        agreed = kappa(before, now)
        found += [] if agreed is None else [agreed]
        before = now
    return found
