"""Scores of labelled records: loss, gradient norm, instruction difficulty and forgetting events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from posttrain.select.scores.answers import encode_answer
from posttrain.select.scores.passes import ScoreGroup, ScoringInput

if TYPE_CHECKING:
    from posttrain.models.chat import TokenizedExample
    from posttrain.models.language_model import LanguageModel

_CHUNK = 64


def loss_group() -> ScoreGroup:
    """``loss``, nats a token of the right answer, and ``gradient_norm`` of it in the output layer."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        found = [loss_and_gradient_norm(lm, encode_answer(lm, one)) for one in records]
        return pa.table(
            {
                "loss": pa.array([loss for loss, _ in found], pa.float64()),
                "gradient_norm": pa.array([norm for _, norm in found], pa.float64()),
            }
        )

    return ScoreGroup("learning", 1, {}, score, _CHUNK)


def instruction_difficulty_group() -> ScoreGroup:
    """``instruction_difficulty``: by what the prompt divides the perplexity of the right answer, inverted."""

    def score(lm: LanguageModel, records: Sequence[ScoringInput]) -> pa.Table:
        from posttrain.models.likelihood import instruction_following_difficulty

        found = instruction_following_difficulty(
            lm, [one.prompt for one in records], [one.answers[0] for one in records]
        )
        return pa.table({"instruction_difficulty": pa.array(found, pa.float64())})

    return ScoreGroup("instruction_difficulty", 1, {}, score, _CHUNK)


def loss_and_gradient_norm(lm: LanguageModel, sequence: TokenizedExample) -> tuple[float, float]:
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


def forgetting_events(correct: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Times that a record is right in one look and wrong in the next; infinite for one that was never right.

    M. Toneva et al., An Empirical Study of Example Forgetting, ICLR 2019 (arXiv:1812.05159), section 3 and, for the
    records that are never learnt, algorithm 1. Here a look is a model of the loop and not a step of a training.

    Args:
        correct: bool [R, N], whether each of R successive models answers each of N records rightly.

    Returns:
        float64 [N].
    """
    right = np.asarray(correct, dtype=bool)
    if right.ndim != 2:
        raise ValueError(f"correct must be [R, N], got shape {right.shape}")
    events = (right[:-1] & ~right[1:]).sum(axis=0).astype(np.float64)
    found: npt.NDArray[np.float64] = np.where(right.any(axis=0), events, np.inf)
    return found
