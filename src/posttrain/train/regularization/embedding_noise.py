"""NEFTune, and the hook that changes embedded tokens on their way into the layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.attention_plan import AttentionPlan
from posttrain.models.language_model import LanguageModel


@contextmanager
def neftune(lm: LanguageModel, alpha: float) -> Iterator[None]:
    """Adds uniform noise in [-s, s] to the embedded tokens while the model trains, with s = alpha / sqrt(L D).

    N. Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, 2023, arXiv:2310.05914, algorithm 1. L is
    the number of tokens read of the sequence itself, whatever is packed or padded beside it, and D the width. Tokens
    that several sequences share get one noise, of the mean of their variances.

    Args:
        lm: the model; nothing is added in evaluation mode, or where no gradient is taken.
        alpha: the strength.
    """

    def add(embedded: Tensor, rows: TokenSegments) -> Tensor:
        noise = torch.empty(embedded.shape, dtype=torch.float32, device=embedded.device).uniform_(-1, 1)
        scale = alpha * (rows.inverse_length / embedded.shape[-1]).sqrt()
        return embedded + noise.mul_(scale[..., None]).to(embedded.dtype)

    with transform_embeddings(lm, add):
        yield


@dataclass(frozen=True)
class TokenSegments:
    """Assigns each token of a forward pass over B rows of T tokens to a segment.

    Args:
        piece: int64 [B, T], number of the piece that a place is in: a sequence, or a part of one where several share
            their beginning.
        pieces: how many pieces there are.
        real: bool [B, T], where there is no padding.
        inverse_length: float32 [B, T], 1 over the number of tokens that are read of the place's own sequence; the mean
            of that where several sequences share the place.
    """

    piece: Tensor
    pieces: int
    real: Tensor
    inverse_length: Tensor

    def norms(self, values: Tensor) -> Tensor:
        """Returns float32 [segments], the L2 norm of each segment's ``values`` [B, T, D]."""
        squares = values.detach().double().square().sum(-1) * self.real
        total = squares.new_zeros(self.pieces).index_add_(0, self.piece.flatten(), squares.flatten())
        return total.sqrt().float()

    def spread(self, values: Tensor) -> Tensor:
        """Returns [B, T, 1], each token's value of its segment, from ``values`` [segments]."""
        return values[self.piece][..., None]


EmbeddingTransform = Callable[[Tensor, TokenSegments], Tensor]
"""Maps embedded tokens [B, T, D] and their segments to the input of the layers."""


@contextmanager
def transform_embeddings(lm: LanguageModel, change: EmbeddingTransform) -> Iterator[None]:
    """Transforms the output of the embedding layer, in training mode and with gradients only.

    The layer's weights stay as they are.
    """
    options: dict[str, Any] = {}

    def begin(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        options.clear()
        options.update(keywords)

    def changed(module: nn.Module, arguments: Any, embedded: Tensor) -> Tensor | None:
        if not module.training or not torch.is_grad_enabled():
            return None
        return change(embedded, token_segments(embedded.shape[:2], options, embedded.device))

    hooks = [
        lm.decoder.register_forward_pre_hook(begin, with_kwargs=True),
        lm.model.get_input_embeddings().register_forward_hook(changed),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def token_segments(shape: Sequence[int], options: Mapping[str, Any], device: torch.device) -> TokenSegments:
    """Finds the segments of a forward pass.

    Args:
        shape: B and T.
        options: arguments of the decoder's call: ``pieces`` for a packed row, ``attention_mask`` [B, T] for padded
            ones; with neither, each row is one sequence.
        device: device of the result.
    """
    if isinstance(options.get("plan"), AttentionPlan):
        return _packed_segments(options["plan"], shape[1], device)
    mask = options.get("attention_mask")
    real = torch.ones(tuple(shape), dtype=torch.bool, device=device) if mask is None else mask.bool()
    piece = torch.arange(shape[0], device=device)[:, None].expand(*shape)
    lengths = real.sum(1, keepdim=True).clamp(min=1)
    return TokenSegments(piece, shape[0], real, (1 / lengths).expand(*shape))


def _packed_segments(plan: AttentionPlan, tokens: int, device: torch.device) -> TokenSegments:
    numbers, first = [], 0
    for group in plan.groups:
        count, width = group.queries.shape
        numbers.append(torch.arange(first, first + count, device=device).repeat_interleave(width))
        first += count
    piece = torch.cat(numbers)[plan.inverse]
    real = torch.ones(1, tokens, dtype=torch.bool, device=device)
    return TokenSegments(piece[None], first, real, _inverse_lengths(plan, tokens, device)[None])


def _inverse_lengths(plan: AttentionPlan, tokens: int, device: torch.device) -> Tensor:
    """Returns float32 [T], the mean of 1 / length over the sequences through each token.

    A sequence is a last segment together with every segment before it that it continues.
    """
    seen = [
        torch.ones_like(group.before, dtype=torch.bool) if group.hidden is None else ~group.hidden
        for group in plan.groups
    ]
    inner = torch.zeros(tokens, dtype=torch.bool, device=device)
    for group, before in zip(plan.groups, seen, strict=True):
        inner[group.before[before]] = True
    real = torch.ones_like(plan.order, dtype=torch.bool) if plan.real is None else plan.real[:, 0]
    # In float64, so that the order of an accelerator's additions cannot be told from the result.
    total = torch.zeros(tokens, dtype=torch.float64, device=device)
    count = torch.zeros_like(total)
    start = 0
    for group, before in zip(plan.groups, seen, strict=True):
        own = real[start : start + group.queries.numel()].view_as(group.queries)
        start += group.queries.numel()
        last = ~(inner[group.queries] & own).any(1, keepdim=True)
        lengths = (own.sum(1, keepdim=True) + before.sum(1, keepdim=True)).clamp(min=1)
        for positions, held in ((group.queries, own), (group.before, before)):
            through = (held & last).double()
            total.index_add_(0, positions.flatten(), (through / lengths).flatten())
            count.index_add_(0, positions.flatten(), through.flatten())
    return (total / count.clamp(min=1)).float()
