"""The config.json of a merged model, and the check that the model it describes has the merged tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.merge.plan import MergePlan
from posttrain.merge.sources import WeightSource
from posttrain.models.loading import check_architecture, load_config
from posttrain.store.errors import UserError

# Keys that hold numbers of layers; other lists whose names speak of layers or blocks have an entry for each.
_LAYER_NUMBERS = (
    *("mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices", "cross_attention_layers"),
    *("rope_scaling_layers", "global_attention_blocks", "ple_layer_ids"),
)


def stacked_changes(template: WeightSource, layers: Sequence[tuple[WeightSource, int]]) -> dict[str, Any]:
    """Returns what slices change in the template's config: the number of layers, and what it says of each layer.

    Args:
        template: the model whose config the result gets.
        layers: for each layer of the result, the model and the layer whose place in it counts.
    """
    values = {source.name: _text_values(source) for source, _ in layers}
    own, nested, count_key = _text_values(template)
    changes: dict[str, Any] = {count_key: len(layers)}
    for key, value in own.items():
        if not isinstance(value, list):
            continue
        if key in _LAYER_NUMBERS:
            changes[key] = [at for at, (source, layer) in enumerate(layers) if layer in values[source.name][0][key]]
        elif ("layer" in key or "block" in key) and len(value) == own.get(count_key):
            changes[key] = [values[source.name][0][key][layer] for source, layer in layers]
    return {nested: {**template.config[nested], **changes}} if nested else changes


def _text_values(source: WeightSource) -> tuple[Mapping[str, Any], str | None, str]:
    """Returns a language model's config with its defaults, the key that holds it, and its key for the layers."""
    nested = "text_config" if isinstance(source.config.get("text_config"), Mapping) else None
    try:
        config = load_config(str(source.folder)).get_text_config()
    except UserError:  # a family that transformers does not know
        return source.config[nested] if nested else source.config, nested, "num_hidden_layers"
    return config.to_dict(), nested, config.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def result_config(plan: MergePlan) -> dict[str, Any]:
    """Returns the config of the merged model: the template's, with what the merge changed."""
    config = dict(plan.template.config) | dict(plan.config_changes)
    if plan.token_ids is not plan.template:
        # Numbers of special tokens are those of the tokenizer's own model.
        config = {key: value for key, value in config.items() if not key.endswith("_token_id")}
        config |= {key: value for key, value in plan.token_ids.config.items() if key.endswith("_token_id")}
    floating = [tensor.dtype for tensor in plan.tensors if tensor.dtype.is_floating_point]
    if floating:
        config.pop("torch_dtype", None)
        config["dtype"] = str(max(set(floating), key=floating.count)).removeprefix("torch.")
    return config


def check_result(plan: MergePlan) -> None:
    """Checks that transformers would load the merged model with each of its tensors, and no other.

    Raises:
        UserError: a tensor would be missing, left over or of another shape.
    """
    check_architecture(result_config(plan), {tensor.name: tensor.shape for tensor in plan.tensors}, "the result")
