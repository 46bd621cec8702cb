"""Parameter groups: the weight decay and learning rate of each layer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from posttrain.store.errors import UserError
from posttrain.train.optim.config import OptimizerConfig

ParameterKind = Literal["matrix", "embedding", "head", "norm", "bias", "other"]

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")


class ParameterLocation(NamedTuple):
    """The location of a parameter in a model.

    kind: matrices are all weights of two or more dimensions that are neither embeddings nor heads.
    depth: number of its layer; -1 below the first layer, None above the last.
    """

    kind: ParameterKind
    depth: int | None


@dataclass(frozen=True)
class NamedParameter:
    """A tensor to optimise (a float32 master), with the name and location of its parameter."""

    name: str
    tensor: Tensor
    kind: ParameterKind
    depth: int | None


def parameter_locations(model: nn.Module) -> dict[str, ParameterLocation]:
    """Locates every parameter of a transformers model (bare, or with a peft adapter), by name.

    Tied weights are one parameter, and an embedding if one of their modules is one. A head is a matrix outside
    the base model: ``lm_head``, ``score``, ``classifier``.
    """
    modules = dict(model.named_modules())
    embeddings = {
        id(parameter)
        for module in modules.values()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    inside = _base_prefix(modules)
    locations: dict[str, ParameterLocation] = {}
    # Parameters come in the model's order: those before the first layer lie below it.
    below = any(_LAYER.search(name) for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        outside = not name.startswith(inside)
        kind = _parameter_kind(name, parameter, modules[name.rpartition(".")[0]], id(parameter) in embeddings)
        # Biases of a head keep their own kind, as they do not decay.
        if outside and kind == "matrix":
            kind = "head"
        layer = None if outside else _LAYER.search(name)
        below = below and layer is None
        if layer is not None:
            depth: int | None = int(layer[1])
        else:
            depth = -1 if kind == "embedding" or (below and not outside) else None
        locations[name] = ParameterLocation(kind, depth)
    return locations


def layer_count(named: Sequence[NamedParameter]) -> int:
    """Counts the layers: one more than the greatest depth among the parameters."""
    return max((parameter.depth + 1 for parameter in named if parameter.depth is not None), default=0)


def parameter_groups(
    named: Sequence[NamedParameter], config: OptimizerConfig, layers: int, rate_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Groups parameters by weight decay and learning rate, as torch's optimisers take them, names included.

    Only matrices and heads decay, unless the config says otherwise. With ``layer_decay`` d, the rate of layer l of n is
    multiplied by d ** (n - l), that of embeddings and all else below the first layer by d ** (n + 1), and the head and
    final norm keep it (Howard & Ruder 2018, arXiv:1801.06146; Clark et al. 2020, arXiv:2003.10555).

    Args:
        named: the tensors of these groups.
        config: the optimiser.
        layers: number of layers of the whole model (``layer_count``).
        rate_scale: multiplies the rate of all of them.

    Returns:
        Groups in order of their first tensor, with ``params`` (pairs of name and tensor), ``weight_decay`` and
        ``lr_scale``: the trainer sets each group's ``lr`` to the rate times ``lr_scale``.

    Raises:
        UserError: if rates should differ by layer and no layer has a number.
    """
    if config.layer_decay != 1 and layers == 0:
        raise UserError(
            "no parameter has a layer number in its name, so rates cannot differ by layer",
            where="train.optimizer.layer_decay",
            fix="set it to 1",
        )
    groups: dict[tuple[float, float], list[tuple[str, Tensor]]] = {}
    for parameter in named:
        decay = config.weight_decay if _decays(parameter.kind, config) else 0.0
        scale = rate_scale * config.layer_decay ** _layers_below_head(parameter, layers)
        groups.setdefault((decay, scale), []).append((parameter.name, parameter.tensor))
    return [{"params": params, "weight_decay": decay, "lr_scale": scale} for (decay, scale), params in groups.items()]


def _layers_below_head(parameter: NamedParameter, layers: int) -> int:
    """Counts the layers between a parameter and the head."""
    if parameter.depth is not None:
        return layers - parameter.depth
    return layers + 1 if parameter.kind == "embedding" else 0


def _decays(kind: ParameterKind, config: OptimizerConfig) -> bool:
    return {
        "matrix": True,
        "head": True,
        "embedding": config.decay_embeddings,
        "norm": config.decay_norms,
        "bias": config.decay_biases,
        # What is not known does not decay: that is the harmless mistake.
        "other": False,
    }[kind]


def _parameter_kind(name: str, parameter: Tensor, owner: nn.Module, embedding: bool) -> ParameterKind:
    if embedding:
        return "embedding"
    if "norm" in type(owner).__name__.lower() and parameter.ndim < 2:
        return "norm"
    if name.endswith("bias"):
        return "bias"
    # State-space models mark 2-D parameters that are no matrices, or name them: they hold the state's decay rates.
    if parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False) or name.endswith("A_log"):
        return "other"
    return "matrix"


def _base_prefix(modules: dict[str, nn.Module]) -> str:
    """Returns the prefix of the base model's parameter names; empty if there is no head around it."""
    from transformers import PreTrainedModel

    for name, module in modules.items():
        if isinstance(module, PreTrainedModel):
            base = f"{name}.{module.base_model_prefix}".lstrip(".")
            return f"{base}." if base in modules else ""
    return ""
