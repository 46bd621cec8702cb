"""What a labelled record still has to teach a model: the loss of its answer, and that loss's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import torch

from posttrain.select.scores.answers import encoded
from posttrain.select.scores.group import Asked, Group

if TYPE_CHECKING:
    from posttrain.models.chat import Encoded
    from posttrain.models.language_model import LanguageModel

_AT_ONCE = 64


def learning_group() -> Group:
    """``loss``, nats a token of the right answer, and ``gradient_norm`` of it in the output layer."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        found = [loss_and_gradient_norm(lm, encoded(lm, one)) for one in records]
        return pa.table(
            {
                "loss": pa.array([loss for loss, _ in found], pa.float64()),
                "gradient_norm": pa.array([norm for _, norm in found], pa.float64()),
            }
        )

    return Group("learning", 1, {}, score, _AT_ONCE)


def instruction_difficulty_group() -> Group:
    """``instruction_difficulty``: by what the prompt divides the perplexity of the right answer, inverted."""

    def score(lm: LanguageModel, records: Sequence[Asked]) -> pa.Table:
        from posttrain.models.instruction_difficulty import instruction_following_difficulty

        found = instruction_following_difficulty(
            lm, [one.prompt for one in records], [one.answers[0] for one in records]
        )
        return pa.table({"instruction_difficulty": pa.array(found, pa.float64())})

    return Group("instruction_difficulty", 1, {}, score, _AT_ONCE)


def loss_and_gradient_norm(lm: LanguageModel, sequence: Encoded) -> tuple[float, float]:
    """Mean negative log-probability of the supervised tokens, in nats, and its gradient's norm in the output layer.

    GraNd (M. Paul, G. Dziugaite, S. Ganguli, NeurIPS 2021) of the last layer, as J. Ash et al. (BADGE, ICLR 2020) take
    gradients. The gradient sum_t d_t h_t^T is never formed, d_t being the loss's gradient in the layer's outputs at
    token t and h_t what the layer reads: its squared norm is sum_ts (d_t . d_s)(h_t . h_s).
    """
    ids = torch.tensor([sequence.ids], device=lm.device)
    at = torch.tensor([place for place, on in enumerate(sequence.supervised) if on and place > 0], device=lm.device)
    with torch.no_grad():
        states = lm.decoder(input_ids=ids, use_cache=False).last_hidden_state[0, at - 1]
    outputs: list[torch.Tensor] = []
    # What the layer gives is caught before the scales and caps that some families put on it.
    handle = lm.model.get_output_embeddings().register_forward_hook(lambda *call: outputs.append(call[2]))
    try:
        with torch.enable_grad():
            logits = lm.logits(states.detach().requires_grad_())
            loss = torch.nn.functional.cross_entropy(logits, ids[0, at])
            (slope,) = torch.autograd.grad(loss, outputs[0])
    finally:
        handle.remove()
    slope, states = slope.double(), states.double()
    squared = ((slope @ slope.T) * (states @ states.T)).sum()
    return float(loss.detach().double()), float(squared.clamp(min=0).sqrt())
