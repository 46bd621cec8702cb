"""Draw a model's weights."""

import hashlib
import re
from collections.abc import Sequence

import torch
from torch import nn

from posttrain.store.errors import UserError
from posttrain.train.initialization.config import InitializationConfig, RuleConfig
from posttrain.train.initialization.methods import Distribution, Role, distribution, fans
from posttrain.train.optimizers.groups import Place, places

# How the families call the projection whose result is added to the residual stream.
_ENDS_BLOCK = re.compile(
    r"(?:^|\.)(?:o_proj|out_proj|down_proj|c_proj|dense|dense_4h_to_h|fc2|fc_out|wo|w2|output_linear)(?:\.weight)?$"
)


@torch.no_grad()
def initialize(model: nn.Module, config: InitializationConfig, seed: int) -> None:
    """Draw the matrices by the config's method, embeddings from N(0, std), and what a rule matches as that says.

    Norms, biases and all else stay as they are, and so do embeddings of padding. Each weight has random numbers of its
    own, which depend on the seed and its name only: a rule for one changes no other.

    Args:
        model: a transformers model as it was made from its config.
        config: how.
        seed: of the random numbers.

    Raises:
        UserError: a rule matches nothing or does not fit, or no weight is known to end a block where that is needed.
    """
    where = places(model)
    modules = dict(model.named_modules())
    layers = max((place.depth + 1 for place in where.values() if place.depth is not None), default=0)
    unused = list(config.rules)
    ending = 0
    for name, weight in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        rule = next((rule for rule in config.rules if re.search(rule.match, name)), None)
        if rule in unused:
            unused.remove(rule)
        role = _role(name, weight, owner, where[name], layers)
        chosen = _chosen(name, weight.shape, where[name], config, rule, role)
        if chosen is None:
            continue
        ending += role.ends_block
        padding = owner.padding_idx if isinstance(owner, nn.Embedding) else None
        weight.copy_(chosen.draw(weight.shape, _generator(seed, name)))
        if padding is not None:
            weight[padding] = 0
    _check(config, unused, ending)


def _role(name: str, weight: nn.Parameter, owner: nn.Module, place: Place, layers: int) -> Role:
    inside = place.depth is not None and place.depth >= 0
    return Role(
        fans(weight, owner),
        place.depth + 1 if inside and place.depth is not None else None,
        layers,
        inside and place.kind == "matrix" and _ENDS_BLOCK.search(name) is not None,
    )


def _chosen(
    name: str, shape: torch.Size, place: Place, config: InitializationConfig, rule: RuleConfig | None, role: Role
) -> Distribution | None:
    if rule is not None:
        return distribution(rule.method, rule.gain, config.std if rule.std is None else rule.std, role, name)
    if place.kind == "embedding":
        return Distribution(config.std)
    # Other two-dimensional parameters, such as a state space's decay rates, mean something: they stay.
    matrix = role.fans is not None and (name.endswith("weight") or len(shape) == 3)
    if place.kind in ("matrix", "head") and matrix and config.method != "none":
        return distribution(config.method, config.gain, config.std, role, name)
    return None


def _check(config: InitializationConfig, unused: Sequence[RuleConfig], ending: int) -> None:
    if unused:
        raise UserError(
            f"no parameter's name matches `{unused[0].match}`",
            where=f"train.initialization.rules.{config.rules.index(unused[0])}",
        )
    if config.method == "depth_scaled" and not ending:
        raise UserError(
            "it is not known which of the model's weights end a block",
            where="train.initialization.method",
            fix="take normal, with a rule for those weights",
        )


def _generator(seed: int, name: str) -> torch.Generator:
    own = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(own[:8], "big") >> 1)
