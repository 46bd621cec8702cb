"""Sequence classification: one label of a closed set for a whole text."""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.models.classifier import class_logits, padding_token
from posttrain.models.head import predicting_states
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit
from posttrain.train.data.units import answer_start, map_sequences, read_to_last_token
from posttrain.train.objectives.base import Objective, ObjectiveInputs, TrainArguments
from posttrain.train.objectives.config import ClassificationConfig
from posttrain.train.objectives.loss import Loss, apply_row_weights, select_row_weights, to_float32


def classification(
    logits: Tensor,
    targets: Tensor,
    config: ClassificationConfig,
    *,
    row_weights: Tensor | None = None,
) -> Loss:
    """Cross-entropy over the labels, with label smoothing e: the target is (1-e) onehot + e / K.

    The smoothing is that of C. Szegedy et al., Rethinking the Inception Architecture, 2015, arXiv:1512.00567,
    section 7.

    Args:
        logits: [N, K].
        targets: int64 [N], in 0..K-1.
        row_weights: float32 [N], what each row counts, in the sum and in the count; 1 each when left out.
    """
    logits = to_float32(logits)
    losses = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=config.label_smoothing)
    total = apply_row_weights(losses, row_weights).sum()
    rows = float(len(targets))
    count = float(apply_row_weights(torch.ones_like(losses), row_weights).sum())
    right = (logits.detach().argmax(-1) == targets).to(logits.dtype)
    return Loss(total, count, {"accuracy": (right.sum(), rows)})


class ClassificationObjective(Objective):
    """``classification``: predicts the class of a text, at the position where a served model is read.

    Args:
        units: one sequence each, a text with one supervised token behind it.
        lm: a model with an output for each class.
        targets: the class of each unit, its index among the outputs.
    """

    formula = staticmethod(classification)

    def __init__(
        self, units: Sequence[Unit], config: TrainArguments, lm: LanguageModel, targets: Sequence[int]
    ) -> None:
        padding = padding_token(lm)
        # The text alone: with the answer's token as input, the class would be read off it.
        super().__init__(
            map_sequences(units, lambda sequence: read_to_last_token(sequence.ids[: answer_start(sequence)], padding)),
            config,
        )
        self.targets = torch.tensor(list(targets))

    @classmethod
    def from_inputs(cls, inputs: ObjectiveInputs) -> Self:
        return cls(inputs.units, inputs.config, inputs.lm, inputs.targets)

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        logits = class_logits(lm, predicting_states(lm, packed))
        targets, row_weights = (
            self.targets[list(rows)].to(logits.device),
            select_row_weights(self.weights, rows, logits),
        )
        return self.formula(logits, targets, self.settings, row_weights=row_weights)
