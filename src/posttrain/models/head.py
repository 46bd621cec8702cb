"""The output head and its log-probabilities, a part of the vocabulary at a time: the logits are never in memory whole.

The gradient of a plain head is computed by hand from the softmax, each part of the weights' gradient written once.
Other heads (scaled or capped logits) are computed twice instead, a few rows at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.models.language_model import LanguageModel

_ROWS = 256
_WORDS = 2048


def token_log_probabilities(lm: LanguageModel, states: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target after its hidden state, with its graph.

    Args:
        states: [N, D], hidden states.
        targets: int64 [N], the tokens that follow.

    Returns:
        float32 [N], nats.
    """
    head = lm.model.get_output_embeddings()
    if _is_plain(lm, head):
        dtype = states.dtype if torch.is_autocast_enabled(states.device.type) else head.weight.dtype
        found: Tensor = _LogProbabilities.apply(states.to(dtype), head.weight.to(dtype), targets)  # type: ignore[no-untyped-call]
        return found
    parts = [
        checkpoint(_slow, lm, states[start : start + _ROWS], targets[start : start + _ROWS], use_reentrant=False)
        for start in range(0, len(states), _ROWS)
    ]
    return torch.cat(parts) if parts else states.new_zeros(0, dtype=torch.float32)


def _is_plain(lm: LanguageModel, head: Any) -> bool:
    config = lm.model.config.get_text_config()
    changed = any(getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"))
    return type(head) is nn.Linear and head.bias is None and not changed


def _slow(lm: LanguageModel, states: Tensor, targets: Tensor) -> Tensor:
    return lm.logits(states).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


class _LogProbabilities(torch.autograd.Function):
    """log softmax(states @ weight.T)[target]; the gradient of logit v is g (1[v = target] - p_v)."""

    @staticmethod
    def forward(context: Any, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chosen = torch.zeros(len(states), dtype=torch.float32, device=states.device)
        largest = torch.full_like(chosen, -torch.inf)
        total = torch.zeros_like(chosen)
        for logits, words, rows in _parts(states, weight, targets):
            chosen[rows] = logits[rows, targets[rows] - words.start]
            before, largest = largest, torch.maximum(largest, logits.amax(1))
            total = total.mul_((before - largest).exp_()).add_(logits.sub_(largest[:, None]).exp_().sum(1))
        total = total.log_().add_(largest)
        context.save_for_backward(states, weight, targets, total)
        return chosen - total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        states, weight, targets, total = context.saved_tensors
        of_states = torch.zeros(states.shape, dtype=torch.float32, device=states.device)
        of_weight = torch.empty_like(weight) if context.needs_input_grad[1] else None
        for logits, words, rows in _parts(states, weight, targets):
            part = logits.sub_(total[:, None]).exp_().mul_(-gradient[:, None])
            part[rows, targets[rows] - words.start] += gradient[rows]
            low = part.to(weight.dtype)
            of_states += low @ weight[words]
            if of_weight is not None:
                torch.matmul(low.T, states, out=of_weight[words])
        return of_states.to(states.dtype), of_weight, None


def _parts(states: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """Float32 logits of a part of the vocabulary, which part, and the rows whose target is in it."""
    for start in range(0, len(weight), _WORDS):
        words = slice(start, min(start + _WORDS, len(weight)))
        rows = ((targets >= words.start) & (targets < words.stop)).nonzero()[:, 0]
        yield (states @ weight[words].T).float(), words, rows
