"""The mean of models, pulled toward their base."""

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import combine
from posttrain.merge.tensor_group import BlockFunction, TensorGroup
from posttrain.store.errors import UserError


@merge_method("regularized_mean", task_vectors=True, ranges={"weight": Range(0), "strength": Range(0)})
def regularized_mean(group: TensorGroup, *, weight: PerModel = (1.0,), strength: float = 1.0) -> BlockFunction:
    """Returns argmin_theta sum_i w_i |theta - theta_i|^2 + strength |theta - theta_0|^2.

    In closed form theta_0 + sum_i w_i (theta_i - theta_0) / (sum_i w_i + strength): ridge regression's pull toward a
    prior, here the base (Hoerl and Kennard 1970). With strength 0 it is the weighted mean, and with more it
    approaches the base.

    Args:
        weight: w, one a model.
        strength: weight of the base.

    Raises:
        UserError: all weights and the strength are zero.
    """
    total = sum(weight) + strength
    if total == 0:
        raise UserError("the weights and the strength are zero", where="weight", fix="give a model a weight above 0")
    return combine([value / total for value in weight])
