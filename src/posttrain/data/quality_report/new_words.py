"""Runs of words that appeared, vanished, or became more or less common."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.data.quality_report.ngrams import Ngrams

SURE = 3.29
"""Of the log-odds' z-score, as two-sided p < 0.001: thousands of runs are looked at."""

_LISTED = 25


@dataclass(frozen=True)
class NgramChange:
    """A run of words in the older and the newer texts.

    Attributes:
        ratio: its share of all runs as long, newer over older; None where the older texts have none of it.
        log_odds: the natural logarithm of the ratio of its odds, drawn to 0 by the prior.
        z: ``log_odds`` in standard deviations.
    """

    ngram: str
    old: int
    new: int
    ratio: float | None
    log_odds: float
    z: float


@dataclass(frozen=True)
class NgramChanges:
    """The surest changes, at most 25 of each kind, the surest first."""

    appeared: tuple[NgramChange, ...]
    vanished: tuple[NgramChange, ...]
    more: tuple[NgramChange, ...]
    less: tuple[NgramChange, ...]

    def to_json(self) -> dict[str, Any]:
        kinds = {"new": self.appeared, "vanished": self.vanished, "more_common": self.more, "less_common": self.less}
        return {kind: [asdict(one) for one in changes] for kind, changes in kinds.items()}


def log_odds(
    old: npt.ArrayLike, new: npt.ArrayLike, prior: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Log-odds-ratio of each run, with an informative Dirichlet prior, and its z-score.

    Equations 16, 20 and 22 of Monroe, Colaresi and Quinn, "Fightin' Words", Political Analysis 2008.

    Args:
        old, new: counts [K].
        prior: pseudo-counts [K], all above zero.

    Returns:
        float64 [K] each; above zero for what is more common in ``new``.
    """
    weights = np.asarray(prior, dtype=np.float64)
    after, before = (np.asarray(one, dtype=np.float64) + weights for one in (new, old))
    delta = np.log(after / (after.sum() - after)) - np.log(before / (before.sum() - before))
    return delta, delta / np.sqrt(1 / after + 1 / before)


def ngram_changes(counted: Sequence[Ngrams]) -> NgramChanges:
    """The changes between the first and the second group of texts, of runs of all lengths together.

    The prior of each length is the counts of both groups, made as heavy as the smaller group's: what both say
    is not held for a change.
    """
    found: list[NgramChange] = []
    for one in counted:
        old, new = one.counts
        sizes = old.sum(), new.sum()
        if len(old) < 2 or not min(sizes):
            continue
        delta, z = log_odds(old, new, (old + new) * (min(sizes) / sum(sizes)))
        for run in np.flatnonzero(np.abs(z) >= SURE).tolist():
            ratio = float(new[run] / sizes[1] / (old[run] / sizes[0])) if old[run] else None
            found.append(
                NgramChange(one.text(run), int(old[run]), int(new[run]), ratio, float(delta[run]), float(z[run]))
            )
    found.sort(key=lambda change: (-abs(change.z), change.ngram))
    return NgramChanges(
        appeared=tuple([one for one in found if one.old == 0][:_LISTED]),
        vanished=tuple([one for one in found if one.new == 0][:_LISTED]),
        more=tuple([one for one in found if one.z > 0 and one.old][:_LISTED]),
        less=tuple([one for one in found if one.z < 0 and one.new][:_LISTED]),
    )
