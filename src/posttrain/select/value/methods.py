"""The methods by their names, with one way to call them: on records and others that are held out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posttrain.select.value.bagging import data_oob
from posttrain.select.value.groups import grouped, sources
from posttrain.select.value.held_out import Part
from posttrain.select.value.leaving_out import leave_one_out
from posttrain.select.value.nearest_neighbours import knn_shapley
from posttrain.select.value.permutation_sampling import beta_shapley, tmc_shapley
from posttrain.select.value.subset_sampling import banzhaf
from posttrain.select.value.utilities.centroids import CentroidUtility
from posttrain.select.value.utilities.neighbours import KNNUtility
from posttrain.select.value.utilities.ridge import RidgeUtility
from posttrain.select.value.utilities.utility import Utility
from posttrain.select.value.values import Values
from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean

LEARNERS: Mapping[str, Callable[..., Utility]] = {
    "neighbours": KNNUtility,
    "centroids": CentroidUtility,
    "ridge": RidgeUtility,
}
"""What learns from the records in a game, by name."""

DRAWS: Mapping[str, int | None] = {
    "knn_shapley": None,
    "tmc_shapley": 100,
    "beta_shapley": 100,
    "banzhaf": 2000,
    "leave_one_out": None,
    "data_oob": 400,
}
"""By method what is drawn at random unless the caller says: permutations, sets or bags; None where nothing is."""

_OWN_LEARNER = ("knn_shapley", "data_oob")

OUT_OF_BAG = "data_oob"
"""The one method that holds nothing out, and whose values are shares of right predictions."""


@dataclass(frozen=True)
class Method:
    """A method with its settings.

    Attributes:
        name: one of `DRAWS`.
        learner: one of `LEARNERS`, for those that play a game with it; neighbours where None.
        draws: how much is drawn at random; the method's own number where None.
        seed: of what is drawn.
        workers: processes; their number changes no digit.
        folder: keeps finished work, so that a killed call goes on.

    Raises:
        UserError: there is no such method or learner, or nothing to draw.
    """

    name: str
    learner: str | None = None
    draws: int | None = None
    seed: int = 0
    workers: int = 1
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.name not in DRAWS:
            raise UserError(f"no method `{self.name}`; {did_you_mean(self.name, DRAWS)}", where="--method")
        if self.learner is not None and self.name in _OWN_LEARNER:
            raise UserError(f"{self.name} has a learner of its own", where="--learner", fix="leave it out")
        if self.learner is not None and self.learner not in LEARNERS:
            raise UserError(f"no learner `{self.learner}`; {did_you_mean(self.learner, LEARNERS)}", where="--learner")
        if self.draws is not None and DRAWS[self.name] is None:
            raise UserError(f"{self.name} draws nothing at random", where="--draws", fix="leave it out")

    def __call__(self, part: Part) -> Values:
        """The values of a part's records or groups: a `Game`.

        Groups are the players themselves, but for `knn_shapley`, whose values add up.
        """
        task = (part.features, part.labels, part.evaluation_features, part.evaluation_labels)
        if self.name == "knn_shapley":
            values = knn_shapley(*task)
            return values if part.groups is None else sources(values, part.groups)
        utility = LEARNERS[self.learner or "neighbours"](*task)
        if part.groups is not None:
            utility = grouped(utility, part.groups)
        drawn, count = {"seed": self.seed, "workers": self.workers, "folder": self.folder}, self._count
        if self.name == "tmc_shapley":
            return tmc_shapley(utility, permutations=count, **drawn)  # type: ignore[arg-type]
        if self.name == "beta_shapley":
            return beta_shapley(utility, permutations=count, **drawn)  # type: ignore[arg-type]
        if self.name == "banzhaf":
            return banzhaf(utility, samples=count, **drawn)  # type: ignore[arg-type]
        return leave_one_out(utility, workers=self.workers, folder=self.folder)

    def out_of_bag(self, features: np.ndarray, labels: list[str]) -> Values:
        """Data-OOB of all records, [N, D] and [N], by nearest centroids: a guess among K labels is worth 1 / K."""
        from sklearn.neighbors import NearestCentroid

        place = {"seed": self.seed, "workers": self.workers, "folder": self.folder}
        return data_oob(features, labels, estimator=NearestCentroid(), bags=self._count, **place)  # type: ignore[arg-type]

    @property
    def _count(self) -> int:
        return self.draws or DRAWS[self.name] or 1
