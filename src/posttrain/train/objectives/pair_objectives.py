"""Lessons from pairs of a chosen and a rejected answer."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from posttrain.models.head import token_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, predicting_states
from posttrain.train.config import TrainConfig
from posttrain.train.data.token_set import longest_lengths
from posttrain.train.data.units import UnitView, count_supervised, whole_text
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.log_probs import add_unit_losses, sequence_log_probs, sum_by_sequence
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.reference import reference_log_probs
from posttrain.train.objectives.sequence_log_probs import SequenceLogProbs


class ReferencePairObjective(Objective):
    """``dpo`` and what is like it: the policy is measured against what it was before its first step."""

    def prepare(self, lm: LanguageModel, folder: Path, *, padded: bool, parts: Iterable[Sequence[int]] = ()) -> None:
        self.before = reference_log_probs(lm, self.units, folder, self.tokens_at_once, padded=padded, parts=parts)

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        chosen, rejected = split_pairs(sequence_log_probs(lm, packed))
        before = self.before[list(rows)].to(chosen.sums.device)
        references = SequenceLogProbs(before[:, 0], chosen.counts), SequenceLogProbs(before[:, 1], rejected.counts)
        weights = self.row_weights(rows, chosen.sums)
        return add_unit_losses(self.function(chosen, rejected, *references, self.settings, row_weights=weights), chosen)


class ReferenceFreeObjective(Objective):
    """``simpo`` and ``cpo``, which may add the chosen answers' likelihood, a mean over the step's tokens."""

    tokens_per_pair = 1.0

    def begin(self, lm: LanguageModel, parts: Sequence[Sequence[int]]) -> float:
        """The step's pairs, by their weights."""
        rows = [row for part in parts for row in part]
        tokens = self.counted(rows, [count_supervised(self.units[row][0]) for row in rows])
        pairs = super().begin(lm, parts)
        self.tokens_per_pair = (tokens or 1.0) / (pairs or 1.0)
        return pairs

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        chosen, rejected = split_pairs(sequence_log_probs(lm, packed))
        loss = self.function(
            chosen,
            rejected,
            self.settings,
            tokens_per_pair=self.tokens_per_pair,
            row_weights=self.row_weights(rows, chosen.sums),
        )
        return add_unit_losses(loss, chosen)


class OrpoObjective(ReferenceFreeObjective):
    """``orpo``, whose likelihood may be that of the chosen text with its prompt.

    The prompt's tokens are supervised in the chosen sequence then, so that the pair does not share them.
    """

    def __init__(self, units: Sequence[Unit], config: TrainConfig) -> None:
        self.answers = units
        if config.orpo.likelihood == "text":
            units = UnitView(
                len(units), lambda place: supervise_whole_chosen(self.answers[place]), longest_lengths(units)
            )
        super().__init__(units, config)

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        found = token_log_probabilities(lm, predicting_states(lm, packed), packed.targets)
        chosen, rejected = split_pairs(sum_by_sequence(found, packed, self._in_answer(rows).to(found.device)))
        texts, _ = split_pairs(sum_by_sequence(found, packed))
        loss = self.function(
            chosen,
            rejected,
            self.settings,
            likelihood=texts,
            tokens_per_pair=self.tokens_per_pair,
            row_weights=self.row_weights(rows, chosen.sums),
        )
        return add_unit_losses(loss, texts)

    def _in_answer(self, rows: Sequence[int]) -> Tensor:
        """bool [S]: which of the supervised tokens belong to an answer."""
        marks: list[bool] = []
        for row in rows:
            for learned, answer in zip(self.units[row], self.answers[row], strict=True):
                marks += [own for on, own in zip(learned.supervised[1:], answer.supervised[1:], strict=True) if on]
        return torch.tensor(marks, dtype=torch.bool)


def supervise_whole_chosen(pair: Unit) -> Unit:
    """The pair with every token of its chosen sequence supervised."""
    chosen, rejected = pair
    return [whole_text(chosen), rejected]


def split_pairs(found: SequenceLogProbs) -> tuple[SequenceLogProbs, SequenceLogProbs]:
    """The chosen and the rejected sequences of pairs that stand one after the other."""
    return found[slice(0, None, 2)], found[slice(1, None, 2)]
