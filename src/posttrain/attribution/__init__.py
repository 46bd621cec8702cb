"""Data attribution: the value of each training record, by cooperative games over models or by gradients."""

from typing import TYPE_CHECKING

from posttrain.store.extensions import lazy_exports

if TYPE_CHECKING:
    from posttrain.attribution.influence.influence_functions import influence_functions
    from posttrain.attribution.influence.tracin import less, tracin
    from posttrain.attribution.influence.trak import trak
    from posttrain.attribution.out_of_bag import data_oob
    from posttrain.attribution.sampled_semivalues import banzhaf, beta_shapley, tmc_shapley
    from posttrain.attribution.semivalues import (
        banzhaf_weights,
        beta_weights,
        leave_one_out,
        semivalue,
        shapley,
        shapley_weights,
    )
    from posttrain.attribution.utilities.classifier import ClassifierUtility
    from posttrain.attribution.utilities.knn import KNNUtility, knn_shapley
    from posttrain.attribution.utilities.linear import CentroidUtility, RidgeUtility
    from posttrain.attribution.utility import group_utility, sum_by_group
    from posttrain.attribution.values import Values

__all__ = [
    "CentroidUtility",
    "ClassifierUtility",
    "KNNUtility",
    "RidgeUtility",
    "Values",
    "banzhaf",
    "banzhaf_weights",
    "beta_shapley",
    "beta_weights",
    "data_oob",
    "group_utility",
    "influence_functions",
    "knn_shapley",
    "leave_one_out",
    "less",
    "semivalue",
    "shapley",
    "shapley_weights",
    "sum_by_group",
    "tmc_shapley",
    "tracin",
    "trak",
]

_HOMES = {
    "CentroidUtility": "utilities.linear",
    "ClassifierUtility": "utilities.classifier",
    "KNNUtility": "utilities.knn",
    "RidgeUtility": "utilities.linear",
    "Values": "values",
    "banzhaf": "sampled_semivalues",
    "banzhaf_weights": "semivalues",
    "beta_shapley": "sampled_semivalues",
    "beta_weights": "semivalues",
    "data_oob": "out_of_bag",
    "group_utility": "utility",
    "influence_functions": "influence.influence_functions",
    "knn_shapley": "utilities.knn",
    "leave_one_out": "semivalues",
    "less": "influence.tracin",
    "semivalue": "semivalues",
    "shapley": "semivalues",
    "shapley_weights": "semivalues",
    "sum_by_group": "utility",
    "tmc_shapley": "sampled_semivalues",
    "tracin": "influence.tracin",
    "trak": "influence.trak",
}

__getattr__ = lazy_exports(__name__, _HOMES)
