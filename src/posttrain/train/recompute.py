"""Activation checkpointing (Chen et al. 2016, arXiv:1604.06174): less is kept for the backward pass, more computed.

Gradients are the same bit for bit: what is computed again has the same inputs and draws the same random numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.models.language_model import LanguageModel
from posttrain.models.layers import with_forward
from posttrain.models.shape import GATED, decoder_layers, is_norm
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.memory.activations import layer_costs
from posttrain.train.memory.batch import MicroBatch
from posttrain.train.memory.choice import Way, chosen_ways
from posttrain.train.memory.weights import Blueprint

_HEAD_NORMS = ("q_norm", "k_norm")


@contextmanager
def recompute(lm: LanguageModel, config: TrainConfig, batch: MicroBatch) -> Iterator[list[Way]]:
    """Have the model compute activations again as ``train.recompute`` says; leave it as it was.

    Args:
        lm: the model as it is trained, its adapter on it.
        config: of the training.
        batch: the largest micro-batch; what fits the budget is chosen for it.

    Yields:
        What each layer computes again.

    Raises:
        UserError: the model's layers cannot be told apart.
    """
    if config.recompute.mode == "none":
        yield []
        return
    layers = decoder_layers(lm.model)
    if layers is None:
        kind = lm.model.config.model_type
        raise UserError(f"models of type {kind} have no list of layers to compute again", where="train.recompute")
    costs = layer_costs(Blueprint.of_model(lm.model), config, batch, lm.device.type)
    chosen = chosen_ways(config, costs, len(layers))
    with ExitStack() as changed:
        for layer, way in zip(layers, chosen, strict=True):
            for part in sorted(way.parts):
                for module, forward in _again(layer, part):
                    changed.enter_context(with_forward(module, forward))
        yield chosen


def _again(layer: nn.Module, part: str) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Modules of a layer, and what takes their forward's place so that a part is computed again."""
    if part == "layer":
        yield layer, _checkpointed(layer.forward)
    elif part == "norms":
        for name, module in layer.named_modules():
            if is_norm(module) and name.rpartition(".")[2] not in _HEAD_NORMS:
                yield module, _checkpointed(module.forward)
    elif part == "attention":
        module = _child(layer, "attn", "attention")
        yield module, _checkpointed(module.forward)
    else:
        module = _child(layer, "mlp", "feed_forward", "ffn", "moe")
        gated = part == "activation" and _is_gated(module)
        yield module, _after_products(module) if gated else _checkpointed(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return run


def _after_products(module: Any) -> Callable[[Tensor], Tensor]:
    """A gated feed-forward block that keeps its first products, and computes again what follows from them."""

    def rest(gate: Tensor, up: Tensor) -> Tensor:
        found: Tensor = module.down_proj(module.act_fn(gate) * up)
        return found

    again = _checkpointed(rest)

    def run(states: Tensor) -> Tensor:
        found: Tensor = again(module.gate_proj(states), module.up_proj(states))
        return found

    return run


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Whether a feed-forward block is ``down(act(gate(x)) * up(x))`` and nothing else, which a probe finds out."""
    if {name for name, _ in module.named_children()} != GATED:
        return False
    weight = next(module.parameters())
    width = module.gate_proj.in_features
    probe = torch.linspace(-2, 2, 2 * width, device=weight.device).view(1, 2, width).to(weight.dtype)
    training = module.training
    module.eval()
    try:
        return torch.equal(module(probe), _after_products(module)(probe))
    finally:
        module.train(training)


def _child(layer: nn.Module, *words: str) -> Any:
    """A layer's own module that one of the words is in the name of, and that is no norm."""
    for name, module in layer.named_children():
        if any(word in name for word in words) and not is_norm(module):
            return module
    raise UserError(
        f"{type(layer).__name__} has no module that is called {words[0]}",
        where="train.recompute.mode",
        fix="use full or none",
    )
