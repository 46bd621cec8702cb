"""Registry of selectors, and `select`, the one way to call them.

A selector is a function ``selector(pool, n, seed, **options) -> int64 rows`` for 0 < n <= free rows, best first: ``n``
of them unless an option bounds them."""

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np

from posttrain.select.selectors.badge import badge
from posttrain.select.selectors.clustering import diverse, typiclust, uncertain_diverse
from posttrain.select.selectors.composite import composite, mmr
from posttrain.select.selectors.coverage import facility_location, prob_cover
from posttrain.select.selectors.farthest_first import k_center
from posttrain.select.selectors.pool import Pool, Scores
from posttrain.select.selectors.ranking import (
    cost_aware,
    density_weighted,
    entropy,
    least_confidence,
    margin,
    random,
    stratified,
    top,
)
from posttrain.select.selectors.similarity import Rows
from posttrain.store.errors import UserError, suggest

Selector = Callable[..., Rows]

SELECTORS: dict[str, Selector] = {
    "random": random,
    "entropy": entropy,
    "least_confidence": least_confidence,
    "margin": margin,
    "top": top,
    "diverse": diverse,
    "uncertain_diverse": uncertain_diverse,
    "k_center": k_center,
    "facility_location": facility_location,
    "mmr": mmr,
    "composite": composite,
    "density_weighted": density_weighted,
    "badge": badge,
    "prob_cover": prob_cover,
    "typiclust": typiclust,
    "stratified": stratified,
    "cost_aware": cost_aware,
}

COVERAGE_SELECTORS = ("diverse", "typiclust", "prob_cover", "k_center", "facility_location")
"""The strategies that go by where records lie, and by doubts at most for how much a neighbourhood is worth.

They choose as well where neighbours speak for most records (see `posttrain.select.score_columns`). Those that rank records
by doubt do not: a mean of several doubts is seldom a great one, so that hardly any of those would be chosen."""

COLD_START_SELECTORS = ("random", *COVERAGE_SELECTORS)
"""The strategies that ask nothing of the model's answers, which say nothing before it is trained."""

_INTEGER_OPTIONS = ("dimensions", "mini_batch", "pool_factor", "ground", "candidates", "classes")

_NUMBER_OPTIONS = ("power", "weight", "relevance", "radius", "budget", "uncertainty", "diversity", "difficulty")


def select(
    strategy: str,
    scores: Scores,
    n: int,
    seed: int = 0,
    labelled: np.ndarray | None = None,
    batch: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    """Row indices of the records to label next.

    A pure function: the same call gives the same rows. Ties are broken by row order, whatever the seed.

    Args:
        strategy: a name in ``SELECTORS``.
        scores: columns with one entry a row: ``probabilities`` float [N, K], ``embeddings`` float [N, D],
            or the measures ``entropy``, ``least_confidence``, ``margin`` float [N]. What a strategy does
            not need may be missing; at least one column is there.
        n: rows wanted; all free rows when there are fewer.
        seed: of whatever the strategy draws.
        labelled: bool [N], rows that are never returned.
        batch: int [B], those of them that are part of the batch already: budgets and quotas count them.
        options: the strategy's own.

    Returns:
        int64 [min(n, free rows)] distinct row indices, best first.

    Raises:
        UserError: for an unknown strategy or option, a number that is out of an option's range, a missing column,
            columns of different lengths, or n < 0.
    """
    if strategy not in SELECTORS:
        raise UserError(f"no strategy `{strategy}`", fix=suggest(strategy, SELECTORS))
    if n < 0:
        raise UserError(f"cannot select {n} records", fix="ask for none or more")
    before = np.empty(0, np.int64) if batch is None else np.asarray(batch, np.int64)
    pool = Pool(scores, _labelled_mask(scores, labelled), before)
    wanted = min(n, len(pool.free))
    _check_options(strategy, options)
    if wanted == 0:
        return np.empty(0, np.int64)
    try:
        chosen = SELECTORS[strategy](pool, wanted, seed, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UserError(f"strategy `{strategy}`: {str(error).split(') ')[-1]}") from None
    return np.asarray(chosen, np.int64)


def _check_options(strategy: str, options: dict[str, Any]) -> None:
    """Raise a UserError for a number that no strategy can work with."""
    for name, value in options.items():
        if value is None or name not in _INTEGER_OPTIONS + _NUMBER_OPTIONS:
            continue
        kind, least = (Integral, 1) if name in _INTEGER_OPTIONS else (Real, 0)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= float(value) < np.inf:
            what = "a whole number, 1 or more" if name in _INTEGER_OPTIONS else "a number, 0 or more"
            raise UserError(f"strategy `{strategy}`: `{name}` is {value!r}, and must be {what}")


def _labelled_mask(scores: Scores, labelled: np.ndarray | None) -> np.ndarray:
    lengths = {name: len(values) for name, values in scores.items()}
    if labelled is not None:
        lengths["labelled"] = len(labelled)
    if not scores:
        raise UserError("the score table has no column")
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"score columns differ in length: {sizes}")
    rows = next(iter(lengths.values()))
    return np.zeros(rows, bool) if labelled is None else np.asarray(labelled, bool)
