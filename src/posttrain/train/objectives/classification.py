"""Sequence classification: one label of a closed set for a whole text."""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.models.classifier import class_logits, output_names, padding_token
from posttrain.models.head import predicting_states
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit
from posttrain.store.errors import UserError, suggest
from posttrain.train.data.units import answer_start, map_sequences, read_to_last_token
from posttrain.train.objectives.base import Objective, ObjectiveInputs, TrainArguments
from posttrain.train.objectives.config import ClassificationConfig
from posttrain.train.objectives.loss import Loss, apply_row_weights, select_row_weights, to_float32


def classification(
    logits: Tensor,
    targets: Tensor,
    config: ClassificationConfig,
    *,
    weights: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """Cross-entropy over the labels, with label smoothing e: the target is (1-e) onehot + e / K.

    The smoothing is that of C. Szegedy et al., Rethinking the Inception Architecture, 2015, arXiv:1512.00567,
    section 7. With weights it is a weighted mean, divided by the weights of the rows' own labels, as in PyTorch.

    Args:
        logits: [N, K].
        targets: int64 [N], in 0..K-1.
        weights: float32 [K], as from ``label_weights``; 1 each when left out.
        row_weights: float32 [N], what each row counts beside that, in the sum and in the count; 1 each when left out.
    """
    logits = to_float32(logits)
    # Not PyTorch's mean: it would divide by the weights of this micro-batch, and the mean is over the whole step.
    losses = functional.cross_entropy(
        logits,
        targets,
        None if weights is None else weights.to(logits),
        reduction="none",
        label_smoothing=config.label_smoothing,
    )
    total = apply_row_weights(losses, row_weights).sum()
    rows = float(len(targets))
    # As PyTorch's weighted mean does, with smoothing too: smoothed labels' weights are in the sum alone.
    counts = torch.ones_like(losses) if weights is None else weights[targets].to(losses)
    count = float(apply_row_weights(counts, row_weights).sum())
    right = (logits.detach().argmax(-1) == targets).to(logits.dtype)
    return Loss(total, count, {"accuracy": (right.sum(), rows)})


def label_weights(labels: Sequence[str], config: ClassificationConfig, where: str | None = None) -> Tensor | None:
    """float32 [K], each label's weight; None if the config names none.

    Raises:
        UserError: a weight is given for something that is not a label.
    """
    for name in config.label_weights:
        if name not in labels:
            raise UserError(f"no label `{name}` to weigh", where=where, fix=suggest(name, labels))
    if not config.label_weights:
        return None
    return torch.tensor([config.label_weights.get(label, 1.0) for label in labels])


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
        self.label_weights = label_weights(output_names(lm), self.settings, "train.objective.label_weights")

    @classmethod
    def from_inputs(cls, inputs: ObjectiveInputs) -> Self:
        return cls(inputs.units, inputs.config, inputs.lm, inputs.targets)

    def begin_step(self, lm: LanguageModel, groups: Sequence[Sequence[int]]) -> float:
        """Counts the step's texts, by their weights and those of their classes."""
        if self.label_weights is None:
            return super().begin_step(lm, groups)
        rows = [row for group in groups for row in group]
        class_weights = self.label_weights[self.targets[rows]].double()
        return float(class_weights.sum() if self.weights is None else class_weights @ self.weights[rows])

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        logits = class_logits(lm, predicting_states(lm, packed))
        weights = None if self.label_weights is None else self.label_weights.to(logits.device)
        targets, row_weights = (
            self.targets[list(rows)].to(logits.device),
            select_row_weights(self.weights, rows, logits),
        )
        return self.formula(logits, targets, self.settings, weights=weights, row_weights=row_weights)
