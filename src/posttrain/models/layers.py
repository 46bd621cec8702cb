"""What a model's layers are: whether they attend to all that came before; and what they do for a while instead."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from posttrain.models.language_model import LanguageModel


def sees_all(lm: LanguageModel, tokens: int) -> bool:
    """Whether every layer is attention over all of ``tokens`` tokens, with positions that can be given to it."""
    config = lm.model.config
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return False
    windows = (getattr(layer, "sliding_window", tokens) for layer in _layers(lm))
    return only_attention(lm) and all(window >= tokens for window in windows)


def only_attention(lm: LanguageModel) -> bool:
    """Whether what layers keep of the tokens they have read is keys and values, windowed or not."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in _layers(lm))


@contextmanager
def with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another forward for a while."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _layers(lm: LanguageModel) -> list[Any]:
    from transformers import DynamicCache

    return list(DynamicCache(config=lm.model.config).layers)
