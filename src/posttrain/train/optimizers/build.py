"""Optimisers from their config: torch's own, with the groups that the config asks for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from posttrain.store.errors import UserError
from posttrain.train.optimizers.adam8bit import adam8bit
from posttrain.train.optimizers.config import OptimizerConfig
from posttrain.train.optimizers.groups import Named, layer_count, parameter_groups
from posttrain.train.optimizers.together import Together

_Make = Callable[[list[dict[str, Any]], OptimizerConfig], Optimizer]


def build(masters: Sequence[Named], config: OptimizerConfig) -> Optimizer:
    """The optimiser of ``masters``, its rate still at zero.

    Before each step, set each group's ``lr`` to the rate times its ``lr_scale``. ``OptimizerState`` saves and loads
    what it remembers. Gradients must be dense.

    Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) takes the rate as the limit of its relative step, of which a
    hundredth is usual.

    Args:
        masters: float32 leaf tensors.
        config: which optimiser, and how.

    Raises:
        UserError: if there is nothing that it could optimise, or it cannot run here.
    """
    if not masters:
        raise UserError("there is no parameter to train", where="train")
    if config.name == "muon":
        return _mixed(masters, [_is_hidden(one) for one in masters], _muon, config, config.muon.rate_scale)
    if config.name == "adam8bit":
        return _mixed(masters, [one.kind in ("matrix", "head") for one in masters], adam8bit, config)
    make: dict[str, _Make] = {"adamw": _adamw, "adafactor": _adafactor, "sgd": _sgd}
    return make[config.name](parameter_groups(masters, config, layer_count(masters)), config)


def _mixed(
    masters: Sequence[Named], chosen: Sequence[bool], make: _Make, config: OptimizerConfig, rate_scale: float = 1.0
) -> Optimizer:
    """One optimiser for the chosen matrices, AdamW for the rest."""
    matrices = [one for one, is_chosen in zip(masters, chosen, strict=True) if is_chosen]
    rest = [one for one, is_chosen in zip(masters, chosen, strict=True) if not is_chosen]
    if not matrices:
        raise UserError(
            f"{config.name} is for weight matrices, and none is trained", where="train.optimizer.name", fix="use adamw"
        )
    layers = layer_count(masters)
    parts = [make(parameter_groups(matrices, config, layers, rate_scale), config)]
    if rest:
        parts.append(_adamw(parameter_groups(rest, config, layers), config))
    return Together(parts)


def _is_hidden(one: Named) -> bool:
    return one.kind == "matrix" and one.tensor.ndim == 2


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """Loshchilov & Hutter 2017, arXiv:1711.05101."""
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)


def _adafactor(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """Shazeer & Stern 2018, arXiv:1804.04235."""
    settings = config.adafactor
    return torch.optim.Adafactor(groups, lr=0.0, beta2_decay=settings.beta2_decay, d=settings.clip_threshold)


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/."""
    return torch.optim.Muon(
        groups,
        lr=0.0,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.muon.iterations,
        adjust_lr_fn=config.muon.adjust,
    )


def _sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """Stochastic gradient descent with momentum (Sutskever et al. 2013); without one, Nesterov's is the same."""
    return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, nesterov=config.nesterov and config.momentum > 0)
