"""Activation checkpointing (Chen et al. 2016, arXiv:1604.06174) and torch.compile, applied layer by layer."""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.models.fused import override_forward
from posttrain.models.language_model import LanguageModel
from posttrain.models.shape import decoder_layers
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig


def recomputed_layers(config: TrainConfig, layers: int) -> int:
    """Returns how many of a model's layers the backward pass computes again."""
    return math.ceil(config.recompute_share * layers)


@contextmanager
def recompute(lm: LanguageModel, config: TrainConfig) -> Iterator[int]:
    """Recomputes activations in the backward pass as ``train.recompute`` says, within a ``with`` block.

    Gradients are the same bit for bit: what is computed again has the same inputs and draws the same random numbers.

    Args:
        lm: the model as it is trained, its adapter on it.
        config: settings of the training.

    Yields:
        The number of layers that are computed again.

    Raises:
        UserError: the layers cannot be found.
    """
    if config.recompute == "none":
        yield 0
        return
    layers = decoder_layers(lm.model)
    if layers is None:
        kind = lm.model.config.model_type
        raise UserError(f"models of type {kind} have no list of layers to recompute", where="train.recompute")
    count = recomputed_layers(config, len(layers))
    with ExitStack() as changed:
        # The first layers: when the backward pass reaches them, the activations of later ones are freed.
        for layer in list(layers)[:count]:
            changed.enter_context(override_forward(layer, _checkpointed(layer.forward)))
        yield count


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        # The reentrant form needs an input with a gradient, which the first layers above frozen embeddings do not have.
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return run


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
