"""The embedded tokens of a model, changed on their way into the layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.language_model import LanguageModel
from posttrain.train.noise.rows import Rows, rows_of

Change = Callable[[Tensor, Rows], Tensor]
"""Embedded tokens [B, T, D] and their places to what the layers get instead."""


@contextmanager
def embeddings_changed(lm: LanguageModel, change: Change) -> Iterator[None]:
    """Change what the embedding layer gives, where something is learned from it: in training mode and with gradients.

    The layer's weights stay as they are.
    """
    options: dict[str, Any] = {}

    def begin(module: nn.Module, arguments: Any, given: dict[str, Any]) -> None:
        options.clear()
        options.update(given)

    def changed(module: nn.Module, arguments: Any, embedded: Tensor) -> Tensor | None:
        if not module.training or not torch.is_grad_enabled():
            return None
        return change(embedded, rows_of(embedded.shape[:2], options, embedded.device))

    hooks = [
        lm.decoder.register_forward_pre_hook(begin, with_kwargs=True),
        lm.model.get_input_embeddings().register_forward_hook(changed),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
