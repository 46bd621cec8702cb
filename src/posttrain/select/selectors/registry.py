"""Registry of selectors, and `select`, the one way to call them.

Other packages add a selector, a function or a `SelectorSpec`, as an entry point of the group ``posttrain.selectors``.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from posttrain.select.selectors.pool import Pool, Scores, Selector
from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry


@dataclass(frozen=True)
class SelectorSpec:
    """A selector, with what the loop must know before it calls it.

    Attributes:
        function: the selector, or its dotted path.
        covers: covers the pool by embeddings, with uncertainty at most as the weight of a neighbourhood. It then
            chooses from unscored records too, whose scores are imputed from their neighbours (see
            `posttrain.select.score_columns`). That is no use to a selector that ranks records by uncertainty: a mean
            of several scores is seldom an extreme one, so hardly any imputed record would be chosen.
        needs_scores: needs the model's answers, which carry no information before it is trained.
    """

    function: Selector | str
    covers: bool = False
    needs_scores: bool = True

    def load(self) -> Selector:
        """Returns the function, imported on first use."""
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        function: Selector = getattr(import_module(module), name)
        return function


_HERE = "posttrain.select.selectors"


_BUILTIN: dict[str, SelectorSpec] = {
    "random": SelectorSpec(f"{_HERE}.ranking:random", needs_scores=False),
    "diverse": SelectorSpec(f"{_HERE}.clustering:diverse", covers=True, needs_scores=False),
    "typiclust": SelectorSpec(f"{_HERE}.clustering:typiclust", covers=True, needs_scores=False),
    "facility_location": SelectorSpec(f"{_HERE}.greedy:facility_location", covers=True, needs_scores=False),
    "entropy": SelectorSpec(f"{_HERE}.ranking:entropy"),
    "least_confidence": SelectorSpec(f"{_HERE}.ranking:least_confidence"),
    "margin": SelectorSpec(f"{_HERE}.ranking:margin"),
    "top": SelectorSpec(f"{_HERE}.ranking:top"),
    "uncertain_diverse": SelectorSpec(f"{_HERE}.clustering:uncertain_diverse"),
    "mmr": SelectorSpec(f"{_HERE}.greedy:mmr"),
    "badge": SelectorSpec(f"{_HERE}.badge:badge"),
}

SELECTORS: Registry[SelectorSpec | Selector] = Registry("selector", "posttrain.selectors", _BUILTIN)


def selector_spec(name: str) -> SelectorSpec:
    """Returns the entry of a selector; a function without one needs scores and covers nothing."""
    part = SELECTORS[name]
    return part if isinstance(part, SelectorSpec) else SelectorSpec(part)


def select(
    strategy: str,
    scores: Scores,
    n: int,
    seed: int = 0,
    labelled: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    """Selects the rows of a score table to label next.

    A pure function: the same call returns the same rows. Ties are broken by row order, whatever the seed.

    Args:
        strategy: name of a selector in ``SELECTORS``.
        scores: columns with one entry per row: ``probabilities`` float [N, K], ``embeddings`` float [N, D],
            or the measures ``entropy``, ``least_confidence``, ``margin`` float [N]. Columns that the selector does not
            use may be missing; at least one column is there.
        n: number of rows; all unlabelled rows when there are fewer.
        seed: seed of the selector's random draws.
        labelled: bool [N], rows that are never returned.
        options: the selector's own.

    Returns:
        int64 [min(n, unlabelled rows)] distinct row indices, best first.

    Raises:
        UserError: an unknown selector or option, a number out of an option's range, a missing column, columns of
            different lengths, or n < 0.
    """
    if strategy not in SELECTORS:
        raise UserError(f"no strategy `{strategy}`", fix=suggest(strategy, SELECTORS))
    if n < 0:
        raise UserError(f"cannot select {n} records", fix="give 0 or more")
    pool = Pool(strategy, scores, _labelled_mask(scores, labelled))
    count = min(n, len(pool.unlabelled_rows))
    if count == 0:
        return np.empty(0, np.int64)
    selector = selector_spec(strategy).load()
    try:
        rows = selector(pool, count, seed, **options)
    except TypeError as error:
        # Python's own message names the option; any other TypeError is a bug and keeps its traceback.
        if "unexpected keyword argument" not in str(error):
            raise
        raise UserError(f"strategy `{strategy}`: {str(error).split(') ')[-1]}") from None
    return np.asarray(rows, np.int64)


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
