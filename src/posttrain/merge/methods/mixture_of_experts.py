"""A mixture of experts out of dense models: their MLPs are the experts, and everything else is the base's."""

from typing import Literal

from posttrain.merge.methods.base import Range, merge_method
from posttrain.merge.methods.linear import combine
from posttrain.merge.tensor_group import BlockFunction, TensorGroup


@merge_method("mixture_of_experts", ranges={"experts_per_token": Range(1)}, result="mixture")
def mixture_of_experts(
    group: TensorGroup, *, gate: Literal["hidden", "random"] = "hidden", experts_per_token: int = 2
) -> BlockFunction:
    """Makes each model's MLP an expert of one Mixtral-like model; the rest is the base's.

    As in sparse upcycling (Komatsuzaki et al. 2023), with experts that differ: y = sum of p_e MLP_e(x) over the k
    experts of the highest gate logits g_e . x, with p their softmax. Llama and Mistral become a Mixtral, Qwen2 a
    Qwen2-MoE (whose shared expert is zero), Qwen3 a Qwen3-MoE. The experts' own norms and attention are lost: experts
    that are far from the base get other inputs than they were trained on.

    Gates come from each expert's prompts. With x_t the MLP's input at token t, which the gate reads too, in the base
    and at the gate's own layer, a prompt's vector is the mean of x_t / |x_t| over all its tokens; g_e is the mean over
    the positive prompts minus that over the negative ones, scaled to length 1. mergekit-moe's recipes are read, but
    its gates are others: of the last token alone, and of the layer's input, before attention and norm.

    Args:
        gate: ``hidden``, from the prompts as above, which runs the base on them and holds it in memory; or ``random``,
            normal with the config's initializer_range, for training.
        experts_per_token: k.
    """
    # In a plan the base is the only model of a shared tensor.
    return combine([1 / group.models] * group.models)
