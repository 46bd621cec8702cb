"""Reward models: one number per answer, learned from which of two is better."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from posttrain.models.classifier import class_logits, padding_token
from posttrain.models.head import predicting_states
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit
from posttrain.train.data.units import map_sequences, read_to_last_token
from posttrain.train.objectives.base import Objective, ObjectiveInputs, TrainArguments
from posttrain.train.objectives.config import RewardConfig
from posttrain.train.objectives.loss import Loss, select_row_weights, to_float32
from posttrain.train.objectives.pairs import logistic, pair_loss


def reward(
    chosen: Tensor,
    rejected: Tensor,
    config: RewardConfig,
    *,
    margin: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """Bradley-Terry: -ln sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2.

    R. A. Bradley, M. E. Terry, Rank Analysis of Incomplete Block Designs, 1952; for language models L. Ouyang et
    al., 2022, arXiv:2203.02155, equation 1. The margin is that of H. Touvron et al., Llama 2, 2023,
    arXiv:2307.09288, equation 2; the centring term that of J. Eisenstein et al., Helping or Herding?, 2023,
    arXiv:2312.09244, equation 2. A mean over pairs, as TRL's RewardTrainer has it.

    Args:
        chosen, rejected: [N], the model's rewards.
        margin: [N], how much better the chosen answer is; 0 when left out.
        row_weights: float32 [N], what each pair counts, in the sum and in the count; 1 each when left out.

    Raises:
        ValueError: they are not vectors of one length.
    """
    # Only the difference counts, and in bfloat16 it would be mostly rounding where two rewards are close.
    chosen, rejected = to_float32(chosen), to_float32(rejected)
    if chosen.ndim != 1 or any(other.shape != chosen.shape for other in (rejected, margin) if other is not None):
        raise ValueError("chosen, rejected and margin are not vectors of one length")
    apart = chosen - rejected
    # Equation 1 of InstructGPT; the margin stands inside of the sigmoid, as in equation 2 of Llama 2.
    losses = logistic(apart if margin is None else apart - to_float32(margin))
    # The loss so far is the same for rewards shifted by a constant; this term holds their mean at 0.
    if config.centring:
        losses = losses + config.centring * (chosen + rejected).square()
    return pair_loss(losses, chosen, rejected, row_weights=row_weights)


class RewardObjective(Objective):
    """``reward``: raises the chosen answer's reward above the rejected one's.

    Args:
        units: pairs.
        lm: a model with one output.
        margins: the wanted difference, for each pair; 0 if unknown.
    """

    formula = staticmethod(reward)

    def __init__(
        self, units: Sequence[Unit], config: TrainArguments, lm: LanguageModel, margins: Sequence[float]
    ) -> None:
        padding = padding_token(lm)
        super().__init__(map_sequences(units, lambda sequence: read_to_last_token(sequence.ids, padding)), config)
        self.margins = torch.tensor(list(margins), dtype=torch.float32)

    @classmethod
    def from_inputs(cls, inputs: ObjectiveInputs) -> Self:
        return cls(inputs.units, inputs.config, inputs.lm, inputs.margins)

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        rewards = class_logits(lm, predicting_states(lm, packed))[:, 0]
        margin = self.margins[list(rows)].to(rewards.device)
        weights = select_row_weights(self.weights, rows, rewards)
        # A pair's sequences are packed one after the other, the chosen one first.
        return self.formula(rewards[0::2], rewards[1::2], self.settings, margin=margin, row_weights=weights)
