"""Model Breadcrumbs: drop the largest and the smallest elements of task vectors."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import normalized, sparsify_and_add
from posttrain.merge.methods.ties import keep_from, sparsify_and_elect
from posttrain.merge.order_statistics import rank_of_share
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup, absolute

_RANGES = {"density": Range(0, 1), "gamma": Range(0, 1)}


@merge_method("breadcrumbs", task_vectors=True, ranges=_RANGES)
def breadcrumbs(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    density: PerModel = (0.9,),
    gamma: PerModel = (0.01,),
    normalize: bool = False,
    scale: float = 1.0,
) -> BlockFunction:
    """Adds task vectors without outliers and small elements: theta_0 + scale sum_i w_i m_i t_i.

    After Davari & Belilovsky 2023. Of the n elements of a task vector in one tensor, ranked by magnitude, the largest
    floor(gamma n) are dropped, the next floor(density n) stay (at least one, unless the density is 0), and the rest is
    dropped; elements that equal the first or the last of those stay too. Where gamma and density add up to more than 1,
    fewer outliers are dropped, so that the density holds: at density 1 everything stays.

    The paper writes both ends as percentiles. mergekit's definition is this one, with a default density of 1. PEFT's
    magnitude_prune is this one with ``gamma`` 0.

    Args:
        weight: w, one a model.
        density: share of the elements that stays.
        gamma: share of the elements that are dropped as outliers.
        normalize: divide the sum by the sum of w.
        scale: factor of the merged task vector, the paper's alpha.
    """
    coefficients = normalized(weight) if normalize else weight
    mask = breadcrumb_mask(group, density, gamma)
    return sparsify_and_add(mask, [scale * coefficient for coefficient in coefficients])


@merge_method("breadcrumbs_ties", task_vectors=True, ranges=_RANGES)
def breadcrumbs_ties(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    density: PerModel = (0.9,),
    gamma: PerModel = (0.01,),
    election: Literal["weighted", "count"] = "weighted",
    normalize: bool = False,
    scale: float = 1.0,
) -> BlockFunction:
    """Merges task vectors without outliers and small elements by elected signs.

    The masks are those of `breadcrumbs`; the election and the sum are TIES' (mergekit's combination, of no paper).

    Args:
        weight: w, one a model.
        density: share of the elements that stays.
        gamma: share of the elements that are dropped as outliers.
        election: by the sum of the values, or by the number of models with the sign (mergekit's ``sum`` and ``count``).
        normalize: divide by the weights of the models that agree, element by element.
        scale: factor of the merged task vector.
    """
    mask = breadcrumb_mask(group, density, gamma)
    return sparsify_and_elect(mask, weight, weight, election, normalize, scale)


def breadcrumb_mask(group: TensorGroup, density: Sequence[float], gamma: Sequence[float]) -> Callable[[Block], None]:
    """Returns the function that sets outliers and small elements of each model to zero, in place."""
    count = group.elements
    kept = [rank_of_share(share, count) for share in density]
    outliers = [min(int(share * count), count - stays) for share, stays in zip(gamma, kept, strict=True)]
    # Without small elements to drop, or without outliers, there is no threshold to search.
    last = [top + stays if 0 < stays < count else 0 for top, stays in zip(outliers, kept, strict=True)]
    first = [top + 1 if top and stays else 0 for top, stays in zip(outliers, kept, strict=True)]
    thresholds = group.kth_largest_of(lambda values: absolute(values) * 2, [*last, *first])
    low = [0.0 if stays == count else value for stays, value in zip(kept, thresholds[: len(kept)], strict=True)]
    high = thresholds[len(kept) :]

    def mask(block: Block) -> None:
        for number, values in enumerate(block.values):
            if outliers[number]:
                # x - x is 0 for the outliers, and x - 0 is x for the others.
                values.sub_(torch.nn.functional.hardshrink(values, high[number]))
            keep_from(values, low[number])

    return mask
