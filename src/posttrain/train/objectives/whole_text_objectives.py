"""Lessons of models that give numbers for a whole text: its reward, or one for each class."""

from collections.abc import Sequence

import torch

from posttrain.models.classifier import class_logits, output_names, padding_token
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, predicting_states
from posttrain.train.config import TrainConfig
from posttrain.train.data.units import answer_start, map_sequences, read_to_last_token
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.classification import label_weights
from posttrain.train.objectives.loss import Loss


class RewardObjective(Objective):
    """``reward``: the chosen answer's reward is to be above the rejected one's.

    Args:
        units: pairs.
        lm: a model with one output.
        margins: by how much, for each pair; 0 where nothing was said.
    """

    def __init__(self, units: Sequence[Unit], config: TrainConfig, lm: LanguageModel, margins: Sequence[float]) -> None:
        padding = padding_token(lm)
        super().__init__(map_sequences(units, lambda sequence: read_to_last_token(sequence.ids, padding)), config)
        self.margins = torch.tensor(list(margins), dtype=torch.float32)

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        rewards = class_logits(lm, predicting_states(lm, packed))[:, 0]
        margin = self.margins[list(rows)].to(rewards.device)
        return self.function(
            rewards[0::2], rewards[1::2], self.settings, margin=margin, row_weights=self.row_weights(rows, rewards)
        )


class ClassificationObjective(Objective):
    """``classification``: the class of a text, as a served model is asked for it.

    Args:
        units: one sequence each, a text with one supervised token behind it.
        lm: a model with an output for each class.
        numbers: the class of each unit, by its place among the outputs.
    """

    def __init__(self, units: Sequence[Unit], config: TrainConfig, lm: LanguageModel, numbers: Sequence[int]) -> None:
        padding = padding_token(lm)
        super().__init__(
            map_sequences(units, lambda sequence: read_to_last_token(sequence.ids[: answer_start(sequence)], padding)),
            config,
        )
        self.numbers = torch.tensor(list(numbers))
        self.label_weights = label_weights(output_names(lm), self.settings, "train.classification.label_weights")

    def begin(self, lm: LanguageModel, parts: Sequence[Sequence[int]]) -> float:
        """The step's texts, by their weights and those of their classes."""
        if self.label_weights is None:
            return super().begin(lm, parts)
        rows = [row for part in parts for row in part]
        own = self.label_weights[self.numbers[rows]].double()
        return float(own.sum() if self.weights is None else own @ self.weights[rows])

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        logits = class_logits(lm, predicting_states(lm, packed))
        weights = None if self.label_weights is None else self.label_weights.to(logits.device)
        targets, row_weights = self.numbers[list(rows)].to(logits.device), self.row_weights(rows, logits)
        return self.function(logits, targets, self.settings, weights=weights, row_weights=row_weights)
