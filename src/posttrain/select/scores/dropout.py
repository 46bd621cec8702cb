"""Sub-networks of a model, drawn by dropout: each is one and the same for all records."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.store.errors import UserError
from posttrain.store.hashing import digest

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


@contextmanager
def sub_network(lm: "LanguageModel", share: float, seed: int, number: int) -> Iterator[None]:
    """Leave out some inputs of every linear layer below the output head for a while, and scale up the others.

    Monte Carlo dropout (Y. Gal and Z. Ghahramani, ICML 2016) with one mask a pass instead of one a record and token,
    "consistent" dropout (A. Kirsch, J. van Amersfoort, Y. Gal, BatchBALD, NeurIPS 2019, section 4.1). So a record's
    score hangs on the record alone, and not on those that it was read with.

    Args:
        share: of the inputs that are left out.
        seed: with ``number``, which pass it is, it decides the masks.

    Raises:
        UserError: the model has no linear layer.
    """
    from transformers.pytorch_utils import Conv1D

    layers = [(name, one) for name, one in lm.decoder.named_modules() if isinstance(one, nn.Linear | Conv1D)]
    if not layers:
        raise UserError("the model has no linear layer to drop inputs of", where="select.scores", fix="leave bald out")
    handles = []
    try:
        for name, layer in layers:
            size = layer.in_features if isinstance(layer, nn.Linear) else layer.nx
            generator = torch.Generator().manual_seed(int(digest([seed, number, name])[:15], 16))
            mask = (torch.rand(size, generator=generator) >= share).to(layer.weight) / (1 - share)
            handles.append(layer.register_forward_pre_hook(_times(mask)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _times(mask: Tensor) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * mask, *inputs[1:])

    return hook
