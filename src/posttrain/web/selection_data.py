"""What the report shows of a round's selection, gathered by the caller; nothing here reads a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from posttrain.web.charts.scatter import Points
from posttrain.web.charts.thin import Numbers

DRAWN = 20
"""Rounds whose batch the page shows in full, the latest; what came before is counted."""


@dataclass(frozen=True)
class ChosenRecord:
    """A record that was chosen to be labelled.

    ``score`` is None where the model said nothing yet, ``label`` while nobody has answered; ``why`` is more than the
    reason says, and ``inclusion`` the probability with which it was drawn, where the batch has them.
    """

    id: str
    rank: int
    reason: str
    score: float | None
    predicted: str | None
    label: str | None
    input: str
    why: str = ""
    inclusion: float | None = None


@dataclass(frozen=True)
class PoolMap:
    """Where records lie: ``chosen`` by id, the others as they are, each float [N, 2]."""

    chosen: Mapping[str, tuple[float, float]]
    pool: Points = field(default_factory=lambda: np.zeros((0, 2)))
    labelled: Points = field(default_factory=lambda: np.zeros((0, 2)))


@dataclass(frozen=True)
class Gain:
    """What a round's labels were expected to bring, and what they brought, in the metric's own unit.

    ``achieved`` is the candidate's value less that of the champion that it had to beat, on the same records; None
    while the round is open.
    """

    round: int
    metric: str
    expected: float
    low: float
    high: float
    achieved: float | None = None


@dataclass(frozen=True)
class Selection:
    """One round's batch.

    Args:
        round: its number.
        strategy: by which it was chosen.
        records: how many were chosen.
        scored: of how many the champion was asked, before it was chosen.
        embedded: of how many it was chosen.
        pool: how many free records the pool had.
        reasons: how many were chosen for each reason.
        worst_classes: what evaluation found weakest.
        chosen: by rank.
        map: where the records lie; None where that is not kept.
        score: name of the score that the strategy goes by.
        scores: float64 [N] of what was scored before it was chosen, NaN where the model says nothing.
        scored_since: float64 [M] of those that were chosen without that.
        gain: expected and achieved; None without an expectation.
        enough: why labelling more has stopped to pay; empty where it may still.
        calibration: ``temperature`` that the scores were divided by, with ``ece_before`` and ``ece_after``; empty where
            they are as the model gave them.
        unshared: kappa of neighbours' labels where it was too small for `auto` to cover the pool; None otherwise.
        missing: sentences on what cannot be shown, and why.
    """

    round: int
    strategy: str
    records: int
    scored: int
    embedded: int
    pool: int
    reasons: Mapping[str, int]
    worst_classes: tuple[str, ...] = ()
    chosen: tuple[ChosenRecord, ...] = ()
    map: PoolMap | None = None
    score: str = "entropy"
    scores: Numbers = field(default_factory=lambda: np.zeros(0))
    scored_since: Numbers = field(default_factory=lambda: np.zeros(0))
    gain: Gain | None = None
    enough: str = ""
    calibration: Mapping[str, float] = field(default_factory=dict)
    unshared: float | None = None
    missing: tuple[str, ...] = ()
