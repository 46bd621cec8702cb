"""Shapley values for any model, estimated by truncated Monte Carlo."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from posttrain.attribution.blocks import Arrays, Floats, run_blocks

_BLOCK_SIZE = 10  # permutations


class Model(Protocol):
    """A model that is trained one row at a time, starting without any."""

    def add(self, row: int) -> None:
        """Adds one row to the training set."""

    def score(self) -> float:
        """Returns the score of the model on the rows added so far; higher is better."""


class Utility(Protocol):
    """The score of a model that is trained on some of the rows 0..players-1.

    One set must always score the same. `posttrain.attribution.ridge.RidgeUtility` is one.
    """

    players: int

    def start(self) -> Model:
        """Returns a model of no rows."""
        ...


def tmc_shapley(
    utility: Utility,
    *,
    permutations: int = 100,
    tolerance: float = 0.01,
    seed: int = 0,
    workers: int = 1,
    folder: Path | None = None,
) -> Floats:
    """Estimates Shapley values by truncated Monte Carlo: the mean of marginal contributions in random permutations.

    Ghorbani and Zou, "Data Shapley: equitable valuation of data for machine learning" (ICML 2019, arXiv:1904.02868),
    algorithm 1: a permutation is truncated, its remaining players adding 0, once the score of those who have joined is
    closer than the tolerance to the score of all. Without truncation the values sum to U(all) - U(none), with it to
    within the tolerance.

    Args:
        utility: utility of N players.
        permutations: number of permutations.
        tolerance: distance to the score of all, in the utility's unit; 0 never truncates.
        seed: permutation p is drawn from ``numpy.random.default_rng([seed, p])``.
        workers: number of processes; it changes no digit.
        folder: caches finished blocks of this utility, tolerance and seed, so that a killed run resumes, as does one
            with more permutations.

    Returns:
        [N].
    """
    # As in a block: on several threads the last digits would differ.
    with threadpool_limits(1):
        everyone = utility.start()
        empty = everyone.score()
        for player in range(utility.players):
            everyone.add(player)
        work = _PermutationMarginals(utility, tolerance, seed, empty, everyone.score())
    blocks = run_blocks(work, permutations, _BLOCK_SIZE, "permutations", workers=workers, folder=folder)
    total: Floats = np.sum([block["marginals"] for block in blocks], axis=0, dtype=np.float64)
    return total / permutations


@dataclass(frozen=True)
class _PermutationMarginals:
    """Sums of the players' marginal contributions; work for `run_blocks`."""

    utility: Utility
    tolerance: float
    seed: int
    empty: float
    grand: float

    def __call__(self, block: range) -> Arrays:
        marginals = np.zeros(self.utility.players)
        for number in block:
            # A generator for each permutation: it is the same in whichever block and process it is drawn.
            order = np.random.default_rng([self.seed, number]).permutation(self.utility.players)
            model, before = self.utility.start(), self.empty
            for player in order.tolist():
                # The score itself is compared, as in algorithm 1, and not a mean of the last marginal contributions.
                if abs(self.grand - before) < self.tolerance:
                    break
                model.add(player)
                score = model.score()
                marginals[player] += score - before
                before = score
        return {"marginals": marginals}
