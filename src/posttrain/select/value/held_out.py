"""Values of records by their own kind: each part of them is held out in turn, and the others are worth what they tell
about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from posttrain.select.value.utilities.learning_task import check_features, check_labels
from posttrain.select.value.utilities.utility import Floats, Rows
from posttrain.select.value.values import Values
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Part:
    """What one part of the records says about the others.

    Attributes:
        features: float64 [n, D] of the records that are worth something here.
        labels: [n].
        evaluation_features: float64 [m, D] of the part that was held out.
        evaluation_labels: [m], the same set of classes as ``labels``.
        groups: int64 [n] in 0..G-1, each with a record, where groups are the players; else None.
    """

    features: Floats
    labels: npt.NDArray[Any]
    evaluation_features: Floats
    evaluation_labels: npt.NDArray[Any]
    groups: Rows | None


class Game(Protocol):
    """A method of this package."""

    def __call__(self, part: Part) -> Values:
        """The values of the n records, or of the G groups."""
        ...


def held_out_values(
    game: Game,
    features: npt.ArrayLike,
    labels: Sequence[Any] | npt.NDArray[Any],
    fold: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64] | None = None,
) -> Values:
    """What each record, or group of records, is worth for predicting records that it does not hold.

    Each fold is held out in turn and the rest valued by it, so that no records beside the N are needed and all of them
    get a value: the mean over the folds that they are not in, each counting by its records. In a fold take part the
    labels that stand both in it and outside it, if there are at least two; a record that is alone with its label has
    no value.

    Args:
        game: the method.
        features: [N, D].
        labels: [N].
        fold: int64 [N], at least two different numbers.
        groups: int64 [N] in 0..G-1; values are of whole groups then, divided by their records.

    Returns:
        Values of the N records, or of a record of each of the G groups on average; NaN without any. Standard errors are
        over the folds (of a weighted mean, W. G. Cochran, Sampling Techniques, 1977, section 6.4), NaN for less than
        two, and made greater for what the folds share: the variance of J of them counts 1 / J + m / n times, with m
        records in a fold and n outside of it (C. Nadeau and Y. Bengio, Inference for the Generalization Error, Machine
        Learning 52, 2003).

    Raises:
        UserError: shapes do not fit, there are fewer than two folds, or no fold has two labels to tell apart.
    """
    known = check_features("features", features)
    given = check_labels("labels", labels, len(known))
    numbers = np.unique(fold)
    if len(fold) != len(known) or len(numbers) < 2:
        raise UserError(f"{len(numbers)} parts of {len(fold)} records; give each of {len(known)} one of two or more")
    players = len(known) if groups is None else int(groups.max()) + 1
    found, weights, evaluations = np.full((len(numbers), players), np.nan), np.zeros(len(numbers)), 0
    for place, number in enumerate(numbers.tolist()):
        inside = fold == number
        both = np.intersect1d(given[inside], given[~inside])
        if len(both) < 2:
            continue
        rows, asked = (np.flatnonzero(side & np.isin(given, both)) for side in (~inside, inside))
        own, among = (rows, None) if groups is None else np.unique(groups[rows], return_inverse=True)
        values = game(Part(known[rows], given[rows], known[asked], given[asked], among))
        counts = 1 if among is None else np.bincount(among)
        found[place, own], weights[place] = values.values / counts, len(asked)
        evaluations += values.evaluations
    if not weights.any():
        raise UserError("no two labels stand with two records each, so that nothing can be held out")
    asked_of = weights[weights > 0].mean()
    return Values(*_over_folds(found, weights, asked_of / (len(known) - asked_of)), evaluations)


def _over_folds(found: Floats, weights: Floats, shared: float) -> tuple[Floats, Floats]:
    """Means and standard errors, float64 [P], of the numbers of each column of [F, P], NaN where a fold has none.

    ``shared`` is the part of a fold's variance that no number of folds takes away.
    """
    there = ~np.isnan(found)
    shares = np.where(there, weights[:, None], 0.0)
    total, count = shares.sum(axis=0), there.sum(axis=0)
    shares /= np.where(total > 0, total, 1)
    mean = np.where(count > 0, (shares * np.where(there, found, 0)).sum(axis=0), np.nan)
    squares = (shares * np.where(there, found - mean, 0)) ** 2
    errors = np.where(
        count > 1, np.sqrt(squares.sum(axis=0) * count / np.maximum(count - 1, 1) * (1 + shared * count)), np.nan
    )
    return mean, errors
