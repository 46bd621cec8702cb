"""The importance of settings: the share of the differences that each explains.

fANOVA (Hutter, Hoos and Leyton-Brown, 2014, https://proceedings.mlr.press/v32/hutter14.html) fits a random forest and
integrates it over the space. Optuna has it, too, but walks its trees once for each split, which takes minutes from 500
trials on, and integrates over numbers as they are; here the measure is the unit cube, from which the space is drawn, so
that a logarithmic range counts by its logarithm.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from posttrain.tune.losses import FEWEST, Comparable, comparable_values, worst_shown
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial

if TYPE_CHECKING:
    from sklearn.tree._tree import Tree

MOST = 2_000
"""Trials that importance is computed from; of more, so many are drawn at random: a forest of 10,000 takes a minute."""

_TREES = 64


@dataclass(frozen=True)
class Importance:
    """The importance of a study's settings.

    Attributes:
        compared: the values that it is about.
        count: of them, those that it was computed from; 0 where there are too few, or all are the same.
        limit: worse values count as this one in fANOVA, or a single training that diverged would decide alone.
        capped: their number.
        shares: fANOVA: the share of the variance over the space that a setting alone explains, the greatest first. What
            is missing to 1 are interactions.
        fit: coefficient of determination (R²) of the forest for trials that a tree has not seen; at or below 0 the
            settings say nothing about the value, whatever their shares.
        conditional: settings that fANOVA leaves out, as they do not exist in all of these trials, and in how many they
            do.
    """

    compared: Comparable
    count: int = 0
    limit: float = math.nan
    capped: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    fit: float = math.nan
    conditional: Mapping[str, int] = field(default_factory=dict)


def measure_importance(space: Space, trials: Sequence[Trial], *, maximize: bool = False, seed: int = 0) -> Importance:
    """Measures the importance of all settings that are drawn.

    Args:
        space: the study's space.
        trials: its trials, by number.
        maximize: whether greater values are better.
        seed: of the random forest, and of a sample of more than 2,000 trials.

    Returns:
        Importance without shares where fewer than 10 values can be compared, or all are the same.
    """
    compared = comparable_values(space, trials)
    numbers = list(compared.values)
    if len(numbers) > MOST:
        numbers = sorted(np.random.default_rng(seed).choice(numbers, MOST, replace=False).tolist())
    values = np.array([compared.values[number] for number in numbers], dtype=np.float64)
    if len(values) < FEWEST or values.min() == values.max():
        return Importance(compared)
    rows = [trials[number] for number in numbers]
    counts = {name: sum(name in trial.drawn for trial in rows) for name in space.parameters}
    names = [name for name, count in counts.items() if count == len(rows)]
    points = np.array([space.to_unit(trial.drawn) for trial in rows])
    kept = [at for at, name in enumerate(space.parameters) if name in names]
    limit = worst_shown(values, maximize)
    capped = np.maximum(values, limit) if maximize else np.minimum(values, limit)
    shares, fit = fanova(points[:, kept], capped, seed) if kept else (np.zeros(0), math.nan)
    return Importance(
        compared,
        len(rows),
        limit,
        int((capped != values).sum()),
        dict(sorted(zip(names, shares.tolist(), strict=True), key=lambda item: -item[1])),
        fit,
        {name: count for name, count in counts.items() if count < len(rows)},
    )


def fanova(points: np.ndarray, values: np.ndarray, seed: int = 0) -> tuple[np.ndarray, float]:
    """Computes the share of the variance over the unit cube that each coordinate alone explains.

    Args:
        points: float64 [N, D], in the unit cube.
        values: float64 [N], not all the same.
        seed: of the random forest.

    Returns:
        Shares, float64 [D], whose sum is at most 1; and the forest's R² for values that a tree has not seen.
    """
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(_TREES, max_depth=64, random_state=seed, oob_score=True)
    with warnings.catch_warnings():
        # Of few values some are seen by all trees: they count as predicted by zero.
        warnings.simplefilter("ignore", UserWarning)
        forest.fit(points, values)
    shares = [effects for tree in forest.estimators_ if (effects := _main_effects(tree.tree_)) is not None]
    # No tree has a variance where all points are the same.
    return np.mean(shares, axis=0) if shares else np.zeros(points.shape[1]), float(forest.oob_score_)


def _main_effects(tree: "Tree") -> np.ndarray | None:
    """Returns the shares of a tree's variance that its coordinates alone explain, [D]; None if it has no variance."""
    low, high = _boxes(tree)
    is_leaf = tree.children_left < 0
    low, high, leaves = low[is_leaf], high[is_leaf], tree.value[is_leaf, 0, 0]
    widths = high - low
    mean = float(widths.prod(axis=1) @ leaves)
    variance = float(widths.prod(axis=1) @ (leaves - mean) ** 2)
    if variance <= 0:
        return None
    shares = np.empty(tree.n_features)
    for axis in range(tree.n_features):
        # The mean over all other axes (equation 4 of the paper) is a step function: each leaf adds its value, weighted
        # by its extent in the other axes, from its lower to its upper end.
        parts = leaves * np.delete(widths, axis, axis=1).prod(axis=1)
        edges, ends = np.unique(np.concatenate([low[:, axis], high[:, axis]]), return_inverse=True)
        marginal = np.cumsum(np.bincount(ends, np.concatenate([parts, -parts]), len(edges)))[:-1]
        shares[axis] = np.diff(edges) @ (marginal - mean) ** 2 / variance
    return shares


def _boxes(tree: "Tree") -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and the upper corner of each node's box in the unit cube, [nodes, D]."""
    low, high = np.zeros((tree.node_count, tree.n_features)), np.ones((tree.node_count, tree.n_features))
    nodes = np.flatnonzero(tree.children_left[:1] >= 0)
    while len(nodes):  # a level of the tree at a time
        left, right = tree.children_left[nodes], tree.children_right[nodes]
        for children in (left, right):
            low[children], high[children] = low[nodes], high[nodes]
        high[left, tree.feature[nodes]] = low[right, tree.feature[nodes]] = tree.threshold[nodes]
        nodes = np.concatenate([left, right])
        nodes = nodes[tree.children_left[nodes] >= 0]
    return low, high
