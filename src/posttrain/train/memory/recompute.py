"""Activation checkpointing (Chen et al. 2016, arXiv:1604.06174) and torch.compile, applied layer by layer.

Gradients are the same bit for bit: what is computed again has the same inputs and draws the same random numbers.

With ``selective``, the choice is a multiple-choice knapsack: each layer has one of a few policies, each with the bytes
that it saves and the FLOPs that it costs. Policies are ordered as a chain in which each step saves the most bytes per
further FLOP; layers take the steps one after another, the best first, until the rest fits (the greedy bound of Sinha &
Zoltners 1979, Operations Research 27(3)). The last step is the cheapest that is enough."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.models.fused import override_forward
from posttrain.models.language_model import LanguageModel
from posttrain.models.shape import GATED, decoder_layers, is_norm
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.memory.activations import ActivationCost, LayerCosts, layer_costs
from posttrain.train.memory.micro_batch import MicroBatch
from posttrain.train.memory.weights import ModelSpec

# They lie within attention, and are recomputed and counted with it.
_HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class RecomputePolicy:
    """The parts of one layer that are recomputed in the backward pass.

    Args:
        parts: some of ``norms``, ``attention``, ``feed_forward``, ``activation``; or ``layer`` alone.
        saved: bytes.
        flops: extra.
    """

    parts: frozenset[str]
    saved: int
    flops: float


@contextmanager
def recompute(lm: LanguageModel, config: TrainConfig, batch: MicroBatch) -> Iterator[list[RecomputePolicy]]:
    """Recomputes activations in the backward pass as ``train.recompute`` says, within a ``with`` block.

    Args:
        lm: the model as it is trained, its adapter on it.
        config: settings of the training.
        batch: the largest micro-batch; what fits the budget is chosen for it.

    Yields:
        The policy of each layer.

    Raises:
        UserError: the layers cannot be found.
    """
    if config.recompute.mode == "none":
        yield []
        return
    layers = decoder_layers(lm.model)
    if layers is None:
        kind = lm.model.config.model_type
        raise UserError(f"models of type {kind} have no list of layers to recompute", where="train.recompute")
    costs = layer_costs(ModelSpec.from_model(lm.model), config, batch, lm.device.type)
    policies = layer_policies(config, costs, len(layers))
    with ExitStack() as changed:
        for layer, policy in zip(layers, policies, strict=True):
            for part in sorted(policy.parts):
                for module, forward in _recomputed_modules(layer, part):
                    changed.enter_context(override_forward(module, forward))
        yield policies


def _recomputed_modules(layer: nn.Module, part: str) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yields the modules of a part of a layer with the forward that recomputes them."""
    if part == "layer":
        yield layer, _checkpointed(layer.forward)
    elif part == "norms":
        for name, module in layer.named_modules():
            if is_norm(module) and name.rpartition(".")[2] not in _HEAD_NORMS:
                yield module, _checkpointed(module.forward)
    elif part == "attention":
        module = _submodule(layer, "attn", "attention")
        yield module, _checkpointed(module.forward)
    else:
        module = _submodule(layer, "mlp", "feed_forward", "ffn", "moe")
        gated = part == "activation" and _is_gated(module)
        yield module, _recompute_after_products(module) if gated else _checkpointed(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        # The reentrant form needs an input with a gradient, which the first layers above frozen embeddings do not have.
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return run


def _recompute_after_products(module: Any) -> Callable[[Tensor], Tensor]:
    """Recomputes a gated feed-forward block except its first two products."""

    def rest(gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = module.down_proj(module.act_fn(gate) * up)
        return output

    again = _checkpointed(rest)

    def run(states: Tensor) -> Tensor:
        output: Tensor = again(module.gate_proj(states), module.up_proj(states))
        return output

    return run


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Returns whether a feed-forward block is ``down(act(gate(x)) * up(x))`` and nothing else; a probe decides."""
    if {name for name, _ in module.named_children()} != GATED:
        return False
    weight = next(module.parameters())
    width = module.gate_proj.in_features
    probe = torch.linspace(-2, 2, 2 * width, device=weight.device).view(1, 2, width).to(weight.dtype)
    training = module.training
    module.eval()
    try:
        # Bit for bit: recomputation must not change a gradient.
        return torch.equal(module(probe), _recompute_after_products(module)(probe))
    finally:
        module.train(training)


def _submodule(layer: nn.Module, *names: str) -> Any:
    """Returns the direct submodule whose name contains one of the names and that is not a norm."""
    for name, module in layer.named_children():
        if any(part in name for part in names) and not is_norm(module):
            return module
    raise UserError(
        f"{type(layer).__name__} has no module that is called {names[0]}",
        where="train.recompute.mode",
        fix="use full or none",
    )


KEEP_ALL = RecomputePolicy(frozenset(), 0, 0.0)


def recompute_policies(costs: LayerCosts) -> list[RecomputePolicy]:
    """Returns all policies of a layer, `KEEP_ALL` first."""
    attention: list[tuple[str, ActivationCost]] = [("attention", costs.attention)]
    forward = [("feed_forward", costs.feed_forward)]
    if costs.activation:
        forward.append(("activation", costs.activation))
    choices = product([None, ("norms", costs.norms)], [None, *attention], [None, *forward])
    policies = []
    for choice in choices:
        parts = [part for part in choice if part]
        saved = sum(cost.saved for _, cost in parts)
        policies.append(
            RecomputePolicy(frozenset(name for name, _ in parts), saved, sum(cost.flops for _, cost in parts))
        )
    # Last, where `full` looks for it.
    return [*policies, RecomputePolicy(frozenset(["layer"]), costs.whole.saved, costs.whole.flops)]


def choose_policies(policies: Sequence[RecomputePolicy], layers: int, needed: int) -> list[RecomputePolicy]:
    """Chooses a policy for each layer so that they save at least ``needed`` bytes, or as many as possible.

    Args:
        policies: all policies, `KEEP_ALL` among them.
        layers: number of layers, all alike.
        needed: bytes.
    """
    chain = _efficient_chain(policies)
    result = [KEEP_ALL] * layers
    missing = needed
    for before, after in pairwise(chain):
        # The first layers recompute: when the backward pass reaches them, the activations of later ones are freed.
        for layer in range(layers):
            if missing <= 0:
                return result
            enough = [policy for policy in policies if policy.saved - before.saved >= missing]
            # The last step: a cheaper policy off the chain may be enough.
            cheapest = min(enough, key=lambda policy: policy.flops, default=after)
            step = cheapest if cheapest.flops <= after.flops else after
            result[layer] = step
            missing -= step.saved - before.saved
    return result


def layer_policies(config: TrainConfig, costs: LayerCosts, layers: int) -> list[RecomputePolicy]:
    """Returns the policy of each layer for ``train.recompute``."""
    recompute = config.recompute
    if recompute.mode == "none":
        return [KEEP_ALL] * layers
    policies = recompute_policies(costs)
    if recompute.mode == "full":
        return [policies[-1]] * layers
    whole = costs.whole.stored * layers
    return choose_policies(policies, layers, whole - recompute.allowed(whole))


def _efficient_chain(policies: Sequence[RecomputePolicy]) -> list[RecomputePolicy]:
    """Orders policies, from `KEEP_ALL` on, so that each saves the most further bytes per further FLOP."""
    chain = [KEEP_ALL]
    while more := [policy for policy in policies if policy.saved > chain[-1].saved]:
        last = chain[-1]

        def worth(policy: RecomputePolicy, last: RecomputePolicy = last) -> tuple[float, int]:
            extra = policy.flops - last.flops
            return ((policy.saved - last.saved) / extra if extra > 0 else float("inf"), policy.saved)

        chain.append(max(more, key=worth))
    return chain


def compile_layers(lm: LanguageModel) -> None:
    """Compiles each layer with ``torch.compile`` on first use, for sequences of any length.

    Raises:
        UserError: there is no compiler, or the model has no list of layers.
    """
    if lm.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError("no C++ compiler is installed", where="train.compile", fix="install g++, or set it to false")
    layers = decoder_layers(lm.decoder)
    if layers is None:
        raise UserError(f"{lm.model.config.model_type} has no list of layers to compile", where="train.compile")
    for layer in layers:
        # With fixed shapes every new length of a micro-batch would compile all over again.
        layer.compile(dynamic=True)
    lm.compiled = True
