"""Plans a mixture of experts: which tensors of dense models are experts, which are shared, and which are new."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.merge.gates import ExpertPrompts, GateSource
from posttrain.merge.methods.base import MergeMethod
from posttrain.merge.methods.registry import load_method
from posttrain.merge.plan import (
    DTYPES,
    MergePlan,
    Sources,
    TensorPlan,
    check_result,
    common_shape,
    tensor_input,
    tensor_names,
)
from posttrain.merge.recipe import ModelEntry, Position, Recipe, resolve
from posttrain.merge.sources import HEAD, WeightSource
from posttrain.merge.tensor_reader import TensorInput
from posttrain.models.loading import load_config
from posttrain.store.errors import UserError

_MLP = re.compile(r"^model\.layers\.(\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.weight$")

_SHARED_WIDTH = 16  # of Qwen2-MoE's shared expert, which must exist, and which is zero


@dataclass(frozen=True)
class _Family:
    """How transformers names the parts of a mixture, and what its config has beside the dense model's.

    Attributes:
        block: name of the part of a layer that holds experts and gate.
        matrices: names of an expert's matrices, by the dense model's.
        count: config key of the number of experts.
        expert_width: config key of an expert's inner width, if it is not the dense model's.
        extra: further values of the config.
        shared: shapes of the shared expert's tensors, by the rest of their names, for a width; -1 stands for it.
    """

    architecture: str
    model_type: str
    block: str
    matrices: Mapping[str, str]
    count: str
    expert_width: str | None = None
    extra: Mapping[str, Any] | None = None
    shared: Mapping[str, tuple[int, int]] | None = None


_MIXTRAL = _Family(
    "MixtralForCausalLM",
    "mixtral",
    "block_sparse_moe",
    {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "num_local_experts",
)

_OWN_NAMES = {name: name for name in ("gate_proj", "up_proj", "down_proj")}

_QWEN = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}

_FAMILIES = {
    "llama": _MIXTRAL,
    "mistral": _MIXTRAL,
    "qwen2": _Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        "mlp",
        _OWN_NAMES,
        "num_experts",
        "moe_intermediate_size",
        {**_QWEN, "shared_expert_intermediate_size": _SHARED_WIDTH},
        {
            "shared_expert.gate_proj.weight": (_SHARED_WIDTH, -1),
            "shared_expert.up_proj.weight": (_SHARED_WIDTH, -1),
            "shared_expert.down_proj.weight": (-1, _SHARED_WIDTH),
            "shared_expert_gate.weight": (1, -1),
        },
    ),
    "qwen3": _Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", "mlp", _OWN_NAMES, "num_experts", "moe_intermediate_size", _QWEN
    ),
}
"""By the dense model's ``model_type``."""


def plan_mixture(
    recipe: Recipe, sources: Sources, template: WeightSource, tokenizer: tuple[Path, WeightSource]
) -> MergePlan:
    """Plans a mixture of experts; arguments are as of `build_plan`.

    Raises:
        UserError: there is no mixture of this architecture, an option is wrong, or an expert has no prompts.
    """
    check_result(recipe, template)
    method = load_method(recipe.method)
    if recipe.base is None:
        raise UserError("a mixture takes its attention and norms from a model", where="base", fix="name one")
    method.check_models(len(recipe.models))
    options = _options(recipe, method)
    prompts = _prompts(recipe.models, options["gate"])
    family = _family(template)
    experts = [sources[entry.model, entry.adapter] for entry in recipe.models]
    names = tensor_names([template, *experts])
    numbers = sorted({int(match[1]) for name in names if (match := _MLP.match(name))})
    layers = [f"model.layers.{number}" for number in numbers]
    if not layers or len(layers) * len(family.matrices) != sum(".mlp." in name for name in names):
        raise UserError("has MLPs with other tensors than three matrices", where=template.name, fix=_families())
    width = template.shapes()[f"{layers[0]}.mlp.gate_proj.weight"][1]
    first = template.stored_dtype(f"{layers[0]}.mlp.gate_proj.weight")
    dtype = DTYPES[recipe.dtype] if recipe.dtype else first
    zeros = {
        f"{layer}.{family.block}.{name}": (width if shape[0] < 0 else shape[0], width if shape[1] < 0 else shape[1])
        for layer in layers
        for name, shape in (family.shared or {}).items()
    }
    gates = GateSource(
        options["gate"],
        template,
        [f"{layer}.{family.block}.gate.weight" for layer in layers],
        prompts,
        width,
        dtype,
        recipe.seed,
        zeros,
    )
    tensors = []
    for name in names:
        inputs = [tensor_input(source, name) for source in experts]
        own = tensor_input(template, name)
        shape = common_shape(name, [own, *inputs])
        stored = template.stored_dtype(own.tensor)
        result = DTYPES[recipe.dtype] if recipe.dtype and stored.is_floating_point else stored
        match = _MLP.match(name)
        if match is None:
            merging = method if stored.is_floating_point else None
            tensors.append(TensorPlan(name, shape, result, (own,), None, merging, options))
            continue
        prefix = f"model.layers.{match[1]}.{family.block}.experts"
        for number, entry in enumerate(inputs):
            expert = f"{prefix}.{number}.{family.matrices[match[2]]}.weight"
            tensors.append(
                TensorPlan(expert, shape, result, (entry,), None, load_method("passthrough"), {"scale": (1.0,)})
            )
    for name, shape in gates.shapes().items():
        tensors.append(TensorPlan(name, shape, dtype, (TensorInput(gates, name),), None, None, options))
    changes = _config(family, template, len(experts), options["experts_per_token"])
    changes |= {"tie_word_embeddings": False} if HEAD in names else {}
    return MergePlan(recipe, tensors, [*sources.values(), gates], template, *tokenizer, config_changes=changes)


def _options(recipe: Recipe, method: MergeMethod) -> dict[str, Any]:
    for entry in recipe.models:
        for option in entry.parameters:
            raise UserError(f"an expert has no option `{option}`", where=f"models.{entry.model}", fix="remove it")
    values = {name: parameter.default for name, parameter in method.options.items()}
    for name, value in recipe.parameters.items():
        method.check_name(name, "parameters")
        values[name] = method.read_option(name, resolve(value, Position("", None), name), len(recipe.models), name)
    if values["experts_per_token"] > len(recipe.models):
        raise UserError(
            f"{values['experts_per_token']} experts per token of {len(recipe.models)}",
            where="experts_per_token",
            fix="choose fewer",
        )
    return values


def _prompts(models: Sequence[ModelEntry], gate: str) -> list[ExpertPrompts]:
    for entry in models:
        if gate == "hidden" and not entry.positive_prompts:
            raise UserError(
                f"the gate `{gate}` is made of prompts, and `{entry.model}` has none",
                where="positive_prompts",
                fix="give each expert some in a recipe, or choose the gate `random`",
            )
        if gate != "hidden" and (entry.positive_prompts or entry.negative_prompts):
            raise UserError(
                f"`{entry.model}` has prompts, which the gate `{gate}` does not use",
                where="gate",
                fix="remove them, or choose the gate `hidden`",
            )
    return [ExpertPrompts(entry.positive_prompts, entry.negative_prompts) for entry in models]


def _family(template: WeightSource) -> _Family:
    config = template.config
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise UserError(
            f"is of type {config.get('model_type')}, which has no mixture of experts here",
            where=template.name,
            fix=_families(),
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UserError(f"has `{key}`, which {family.architecture} lacks", where=template.name, fix=_families())
    return family


def _families() -> str:
    return f"use models of one of the types {', '.join(_FAMILIES)}"


def _config(family: _Family, template: WeightSource, experts: int, per_token: int) -> dict[str, Any]:
    from transformers import PretrainedConfig

    # With the values that the dense model's class adds to its file: the mixture's class has other defaults.
    values = load_config(str(template.folder)).to_dict()
    added = values.keys() - PretrainedConfig().to_dict().keys() - template.config.keys()
    changes = {
        **{key: values[key] for key in sorted(added)},
        "architectures": [family.architecture],
        "model_type": family.model_type,
        family.count: experts,
        "num_experts_per_tok": per_token,
        "output_router_logits": False,
        **(family.extra or {}),
    }
    if family.expert_width is not None:
        changes[family.expert_width] = template.config["intermediate_size"]
    return changes
