"""Kinds and layers of parameters, and their groups by weight decay."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

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


def parameter_groups(named: Sequence[NamedParameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups parameters by weight decay, as torch's optimisers take them, names included.

    Only matrices and heads decay. A parameter of unknown kind does not: that is the harmless mistake.

    Returns:
        Groups in order of their first tensor, with ``params`` (pairs of name and tensor) and ``weight_decay``.
    """
    groups: dict[float, list[tuple[str, Tensor]]] = {}
    for parameter in named:
        decay = weight_decay if parameter.kind in ("matrix", "head") else 0.0
        groups.setdefault(decay, []).append((parameter.name, parameter.tensor))
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]


def _parameter_kind(name: str, parameter: Tensor, owner: nn.Module, embedding: bool) -> ParameterKind:
    if embedding:
        return "embedding"
    if "norm" in type(owner).__name__.lower() and parameter.ndim < 2:
        return "norm"
    if name.endswith("bias"):
        return "bias"
    # State-space models mark 2-D parameters that are not matrices, or name them: they hold the state's decay rates.
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
