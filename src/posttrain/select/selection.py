"""Choose which rows of a score table are worth a label."""

from numbers import Integral, Real
from typing import Any

import numpy as np

from posttrain.select.selectors.pool import Pool, Scores
from posttrain.select.selectors.registry import STRATEGIES
from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean

_COUNTS = ("dimensions", "mini_batch", "pool_factor", "ground", "candidates", "classes")
_NUMBERS = ("power", "weight", "relevance", "radius", "budget", "uncertainty", "diversity", "difficulty")


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
        strategy: a name in ``STRATEGIES``.
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
    if strategy not in STRATEGIES:
        raise UserError(f"no strategy `{strategy}`", fix=did_you_mean(strategy, STRATEGIES))
    if n < 0:
        raise UserError(f"cannot select {n} records", fix="ask for none or more")
    before = np.empty(0, np.int64) if batch is None else np.asarray(batch, np.int64)
    pool = Pool(scores, _labelled(scores, labelled), before)
    wanted = min(n, len(pool.free))
    _check(strategy, options)
    if wanted == 0:
        return np.empty(0, np.int64)
    try:
        chosen = STRATEGIES[strategy](pool, wanted, seed, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UserError(f"strategy `{strategy}`: {str(error).split(') ')[-1]}") from None
    return np.asarray(chosen, np.int64)


def _check(strategy: str, options: dict[str, Any]) -> None:
    """Raise a UserError for a number that no strategy can work with."""
    for name, value in options.items():
        if value is None or name not in _COUNTS + _NUMBERS:
            continue
        kind, least = (Integral, 1) if name in _COUNTS else (Real, 0)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= float(value) < np.inf:
            what = "a whole number, 1 or more" if name in _COUNTS else "a number, 0 or more"
            raise UserError(f"strategy `{strategy}`: `{name}` is {value!r}, and must be {what}")


def _labelled(scores: Scores, labelled: np.ndarray | None) -> np.ndarray:
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
