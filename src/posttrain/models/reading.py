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
        Whether it does; if not, rows must be padded, and the model's attention is its own.
    """
    config: Any = lm.decoder.config
    before = config._attn_implementation
    attention.register()
    try:
        packs = sees_all(lm, longest) and _packs(lm)
        if not packs:
            lm.model.set_attn_implementation(before)
        yield packs
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
    """Switch to packed attention and see whether sequences in one row come out as in rows of their own, and apart."""
    last = int(lm.model.config.get_text_config().vocab_size) - 1
    ids = [min(token, last) for token in range(3, 19)]
    probe = [Encoded([*ids, *ids[:more]], [False] * 15 + [True] * (1 + more)) for more in (0, 2, 5)]
    units = [probe[:1], probe[1:]]
    config: Any = lm.decoder.config
    training = lm.model.training
    lm.model.eval()
    try:
        rows = read(lm, pack(units, lm.device, padded=True))
        lm.model.set_attn_implementation(attention.NAME)
        if config._attn_implementation != attention.NAME:  # the model's layers call no attention but their own
            return False
        packed = pack(units, lm.device)
        found, reach = _read_and_reach(lm, packed, 1)
    except (KeyError, TypeError, ValueError):  # its layers call attention otherwise, or with what this one refuses
        return False
    finally:
        lm.model.train(training)
    # Differences may be small because all that attention does is small, as it is in a model that was just made.
    crosses = reach[packed.predicting[packed.sequence != 1]].any()
    return bool((found - rows).abs().max() < 0.05 * rows.abs().max() and not crosses)


def _read_and_reach(lm: LanguageModel, packed: Packed, sequence: int) -> tuple[Tensor, Tensor]:
    """Hidden states [S, D], and where those of one sequence come from.

    The second is their gradient [T, D] by the row's embedded tokens. It is 0, in every precision, at tokens that do not
    take part; a difference after other tokens were put there would be rounded otherwise where experts sort tokens.
    """
    embedded: list[Tensor] = []

    def keep(_module: Any, _given: Any, found: Tensor) -> Tensor:
        embedded.append(found.detach().requires_grad_())
        return embedded[-1]

    hook = lm.model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            found = read(lm, packed)
            own = found[packed.sequence == sequence]
            # Weights that differ, as the plain sum of normed states never changes.
            weights = torch.linspace(-1, 1, own.shape[1], dtype=own.dtype, device=own.device).expand_as(own)
            (reach,) = torch.autograd.grad(own, embedded, weights)
    finally:
        hook.remove()
    return found.detach(), reach[0]
