"""Methods whose result is a LoRA adapter on the base: what a model learned, and several adapters in one."""

from typing import Literal

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import combine, normalized
from posttrain.merge.tensor_group import BlockFunction, TensorGroup

_RANGES = {"rank": Range(1), "energy": Range(1e-12, 1)}


@merge_method("extract_lora", task_vectors=True, models=(1, 1), ranges=_RANGES, result="adapter")
def extract_lora(
    group: TensorGroup,
    *,
    scale: float = 1.0,
    rank: int = 32,
    energy: float = 1.0,
    others: Literal["save", "drop"] = "save",
) -> BlockFunction:
    """Writes the task vector as a LoRA adapter: B A is the truncated SVD of scale (theta_1 - theta_0), by matrix.

    Eckart and Young 1936; the factors share the singular values, and alpha equals the rank, so that peft multiplies by
    one. With ``as_adapter`` any method on task vectors takes ``rank``, ``energy`` and ``others``, and the merged task
    vector is written so. A layer holds a float32 matrix of its size in memory, and the adapter is held until it is
    written.

    mergekit-extract-lora has no energy, and its max_rank is ``rank``; peft's add_weighted_adapter of type "svd" gives
    all of the singular values to B, with the same product.

    Args:
        scale: factor of the task vector.
        rank: the highest rank of a matrix.
        energy: share of a matrix's squared singular values to keep, by the least rank that does, up to ``rank``.
        others: ``save`` changed tensors that are not matrices of a linear layer (norms, embeddings) whole, in the
            adapter's ``modules_to_save``, or ``drop`` them; the report names them either way.
    """
    return combine([scale])


@merge_method("concatenate_lora", task_vectors=True, result="adapter")
def concatenate_lora(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    normalize: bool = False,
    others: Literal["save", "drop"] = "save",
) -> BlockFunction:
    """Adds LoRA adapters of the base exactly: B = [w_1 s_1 B_1 | w_2 s_2 B_2 | ...], A = [A_1 ; A_2 ; ...].

    The rank of the result is the sum of the ranks. It is peft's add_weighted_adapter of type "cat". Its type "linear"
    is another thing: it adds the factors, (sum_i c_i B_i) (sum_i c_i A_i) with c_i = sqrt(w_i s_i), which has products
    of one adapter's B with another's A and needs equal ranks.

    Args:
        weight: w, one per adapter.
        normalize: divide w by their sum.
        others: as of `extract_lora`.
    """
    return combine(normalized(weight) if normalize else weight)
