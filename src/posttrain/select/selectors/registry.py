"""Registry of selectors, and `select`, the one way to call them.

Other packages add a selector as an entry point of the group ``posttrain.selectors``.
"""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from posttrain.select.selectors.pool import Pool, Scores, Selector
from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry

_HERE = "posttrain.select.selectors"

SELECTORS: Mapping[str, Selector] = Registry(
    "selector",
    "posttrain.selectors",
    {
        "random": f"{_HERE}.ranking:random",
        "entropy": f"{_HERE}.ranking:entropy",
        "least_confidence": f"{_HERE}.ranking:least_confidence",
        "margin": f"{_HERE}.ranking:margin",
        "top": f"{_HERE}.ranking:top",
        "diverse": f"{_HERE}.clustering:diverse",
        "uncertain_diverse": f"{_HERE}.clustering:uncertain_diverse",
        "k_center": f"{_HERE}.farthest_first:k_center",
        "facility_location": f"{_HERE}.coverage:facility_location",
        "mmr": f"{_HERE}.farthest_first:mmr",
        "composite": f"{_HERE}.farthest_first:composite",
        "density_weighted": f"{_HERE}.ranking:density_weighted",
        "badge": f"{_HERE}.badge:badge",
        "prob_cover": f"{_HERE}.coverage:prob_cover",
        "typiclust": f"{_HERE}.clustering:typiclust",
        "stratified": f"{_HERE}.ranking:stratified",
        "cost_aware": f"{_HERE}.ranking:cost_aware",
    },
)

COVERAGE_SELECTORS = ("diverse", "typiclust", "prob_cover", "k_center", "facility_location")
"""The selectors that use the embeddings, and uncertainty at most as the weight of a neighbourhood.

They choose as well where most scores are imputed from neighbours (see `posttrain.select.score_columns`). Selectors that
rank records by uncertainty do not: a mean of several scores is seldom an extreme one, so hardly any imputed record
would be chosen."""

COLD_START_SELECTORS = ("random", *COVERAGE_SELECTORS)
"""The selectors that need none of the model's answers, which carry no information before it is trained."""

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
    """Selects the rows of a score table to label next.

    A pure function: the same call returns the same rows. Ties are broken by row order, whatever the seed.

    Args:
        strategy: name of a selector in ``SELECTORS``.
        scores: columns with one entry a row: ``probabilities`` float [N, K], ``embeddings`` float [N, D],
            or the measures ``entropy``, ``least_confidence``, ``margin`` float [N]. Columns that the selector does not
            use may be missing; at least one column is there.
        n: rows wanted; all free rows when there are fewer.
        seed: of the selector's random draws.
        labelled: bool [N], rows that are never returned.
        batch: int [B], the labelled rows that are already part of the batch: budgets and quotas count them.
        options: the selector's own.

    Returns:
        int64 [min(n, free rows)] distinct row indices, best first.

    Raises:
        UserError: for an unknown selector or option, a number that is out of an option's range, a missing column,
            columns of different lengths, or n < 0.
    """
    if strategy not in SELECTORS:
        raise UserError(f"no strategy `{strategy}`", fix=suggest(strategy, SELECTORS))
    if n < 0:
        raise UserError(f"cannot select {n} records", fix="give 0 or more")
    before = np.empty(0, np.int64) if batch is None else np.asarray(batch, np.int64)
    pool = Pool(scores, _labelled_mask(scores, labelled), before)
    count = min(n, len(pool.free))
    _check_options(strategy, options)
    if count == 0:
        return np.empty(0, np.int64)
    try:
        rows = SELECTORS[strategy](pool, count, seed, **options)
    except TypeError as error:
        # Python's own message names the option; any other TypeError is a bug and keeps its traceback.
        if "unexpected keyword argument" not in str(error):
            raise
        raise UserError(f"strategy `{strategy}`: {str(error).split(') ')[-1]}") from None
    return np.asarray(rows, np.int64)


def _check_options(strategy: str, options: dict[str, Any]) -> None:
    """Raises a UserError for a number that no selector can work with."""
    for name, value in options.items():
        if value is None or name not in _INTEGER_OPTIONS + _NUMBER_OPTIONS:
            continue
        kind, least = (Integral, 1) if name in _INTEGER_OPTIONS else (Real, 0)
        # True is an Integral in Python, and NaN fails both comparisons.
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= float(value) < np.inf:
            expected = "a whole number, 1 or more" if name in _INTEGER_OPTIONS else "a number, 0 or more"
            raise UserError(f"strategy `{strategy}`: `{name}` is {value!r}, and must be {expected}")


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
