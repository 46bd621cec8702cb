"""Read packed sequences: without padding where a model's attention can be confined, else as padded rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from posttrain.models import attention
from posttrain.models.chat import Encoded
from posttrain.models.language_model import LanguageModel
from posttrain.models.layers import sees_all
from posttrain.models.packing import Packed, pack


def read(lm: LanguageModel, packed: Packed) -> Tensor:
    """Hidden states [S, D] at the places that predict a supervised token."""
    return _predicting(_read(lm, packed).last_hidden_state, packed)


def read_layers(lm: LanguageModel, packed: Packed, layers: Sequence[int]) -> list[Tensor]:
    """Hidden states [S, D] of several layers: 0 is what the first one reads, and -1 is what ``read`` gives."""
    states = _read(lm, packed, output_hidden_states=True).hidden_states
    return [_predicting(states[layer], packed) for layer in layers]


@contextmanager
def packing(lm: LanguageModel, longest: int) -> Iterator[bool]:
    """Confine the model's attention to pieces, if that gives what it gives for sequences of up to ``longest`` tokens.

    Yields:
        Whether it does; if not, rows must be padded.
    """
    config: Any = lm.decoder.config
    before = config._attn_implementation
    attention.register()
    try:
        yield sees_all(lm, longest) and _packs(lm)
    finally:
        lm.model.set_attn_implementation(before)


def _read(lm: LanguageModel, packed: Packed, **more: Any) -> Any:
    if not packed.padded:
        places = {"position_ids": packed.positions, "pieces": packed.pieces}
        return lm.decoder(input_ids=packed.ids, **places, use_cache=False, **more)
    (rows,) = packed.pieces.groups
    mask = torch.zeros_like(rows.queries).view(-1).index_fill_(0, packed.pieces.places, 1).view_as(rows.queries)
    return lm.decoder(input_ids=packed.ids[0][rows.queries], attention_mask=mask, use_cache=False, **more)


def _predicting(hidden: Tensor, packed: Packed) -> Tensor:
    """The rows of hidden states [B, T, D] that predict a supervised token."""
    places = packed.pieces.places[packed.predicting] if packed.padded else packed.predicting
    return hidden.flatten(0, 1).index_select(0, places)


@torch.no_grad()
def _packs(lm: LanguageModel) -> bool:
    """Switch to packed attention and see whether sequences in one row come out as they do in rows of their own."""
    last = int(lm.model.config.get_text_config().vocab_size) - 1
    ids = [min(token, last) for token in range(3, 19)]
    probe = [Encoded([*ids, *ids[:more]], [False] * 15 + [True] * (1 + more)) for more in (0, 2, 5)]
    units = [probe[:1], probe[1:]]
    training = lm.model.training
    lm.model.eval()
    try:
        rows = read(lm, pack(units, lm.device, padded=True))
        lm.model.set_attn_implementation(attention.NAME)
        found = read(lm, pack(units, lm.device))
    except (KeyError, TypeError, ValueError):  # its layers call attention otherwise, or with what this one refuses
        return False
    finally:
        lm.model.train(training)
    return bool((found - rows).abs().max() < 0.05 * rows.abs().max())
