"""What each training record is worth: by games over models that learn from some records, or by gradients."""

from typing import TYPE_CHECKING

from posttrain.store.late_names import late_names

if TYPE_CHECKING:
    from posttrain.select.value.bagging import data_oob
    from posttrain.select.value.exact import semivalue, shapley
    from posttrain.select.value.groups import grouped, sources
    from posttrain.select.value.influence.functions import influence_functions
    from posttrain.select.value.influence.less import less
    from posttrain.select.value.influence.tracin import tracin
    from posttrain.select.value.influence.trak import trak
    from posttrain.select.value.leaving_out import leave_one_out
    from posttrain.select.value.nearest_neighbours import knn_shapley
    from posttrain.select.value.permutation_sampling import beta_shapley, tmc_shapley
    from posttrain.select.value.semivalue_weights import banzhaf_weights, beta_weights, shapley_weights
    from posttrain.select.value.subset_sampling import banzhaf
    from posttrain.select.value.utilities.centroids import CentroidUtility
    from posttrain.select.value.utilities.classifier import ClassifierUtility
    from posttrain.select.value.utilities.neighbours import KNNUtility
    from posttrain.select.value.utilities.ridge import RidgeUtility
    from posttrain.select.value.values import Values

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
    "grouped",
    "influence_functions",
    "knn_shapley",
    "leave_one_out",
    "less",
    "semivalue",
    "shapley",
    "shapley_weights",
    "sources",
    "tmc_shapley",
    "tracin",
    "trak",
]

_HOMES = {
    "CentroidUtility": "utilities.centroids",
    "ClassifierUtility": "utilities.classifier",
    "KNNUtility": "utilities.neighbours",
    "RidgeUtility": "utilities.ridge",
    "Values": "values",
    "banzhaf": "subset_sampling",
    "banzhaf_weights": "semivalue_weights",
    "beta_shapley": "permutation_sampling",
    "beta_weights": "semivalue_weights",
    "data_oob": "bagging",
    "grouped": "groups",
    "influence_functions": "influence.functions",
    "knn_shapley": "nearest_neighbours",
    "leave_one_out": "leaving_out",
    "less": "influence.less",
    "semivalue": "exact",
    "shapley": "exact",
    "shapley_weights": "semivalue_weights",
    "sources": "groups",
    "tmc_shapley": "permutation_sampling",
    "tracin": "influence.tracin",
    "trak": "influence.trak",
}

__getattr__ = late_names(__name__, _HOMES)
