"""NEFTune: noise on embedded tokens on their way into the layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

    options: dict[str, Any] = {}

    def begin(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        options.clear()
        options.update(keywords)

    def add(module: nn.Module, arguments: Any, embedded: Tensor) -> Tensor | None:
        if not module.training or not torch.is_grad_enabled():
            return None
        noise = torch.empty(embedded.shape, dtype=torch.float32, device=embedded.device).uniform_(-1, 1)
        lengths = inverse_lengths(embedded.shape[:2], options, embedded.device)
        scale = alpha * (lengths / embedded.shape[-1]).sqrt()
        return embedded + noise.mul_(scale[..., None]).to(embedded.dtype)

    hooks = [
        lm.decoder.register_forward_pre_hook(begin, with_kwargs=True),
        lm.model.get_input_embeddings().register_forward_hook(add),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def inverse_lengths(shape: Sequence[int], options: Mapping[str, Any], device: torch.device) -> Tensor:
    """Returns float32 [B, T], 1 over the number of tokens that are read of each place's sequence.

    It is the mean of that where several sequences share the place.

    Args:
        shape: B and T.
        options: arguments of the decoder's call: ``plan`` for a packed row, ``attention_mask`` [B, T] for padded
            ones; with neither, each row is one sequence.
        device: device of the result.
    """
    if isinstance(options.get("plan"), AttentionPlan):
        return _packed_inverse_lengths(options["plan"], shape[1], device)[None]
    mask = options.get("attention_mask")
    if mask is None:
        return torch.full(tuple(shape), 1 / max(shape[1], 1), device=device)
    lengths: Tensor = mask.bool().sum(1, keepdim=True).clamp(min=1)
    return (1 / lengths).expand(*shape)


def _packed_inverse_lengths(plan: AttentionPlan, tokens: int, device: torch.device) -> Tensor:
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
