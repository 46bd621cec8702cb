"""The lesson from answers that are desirable or not."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, pack
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.data.token_set import longest_lengths
from posttrain.train.data.units import UnitView, answer_start, map_sequences, only_answer
from posttrain.train.objectives.base import Objective, evaluation_mode
from posttrain.train.objectives.kto import kl_estimate
from posttrain.train.objectives.log_probs import add_unit_losses, sequence_log_probs
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.reference import reference_log_probs
from posttrain.train.objectives.sequence_log_probs import SequenceLogProbs


class KtoObjective(Objective):
    """``kto``: each answer against the reference, shifted by an estimate of the policy's divergence from it.

    The estimate is that of the whole step, from prompts with other prompts' answers. TRL makes one for each
    micro-batch; a step would have another gradient for each way of cutting it then. Where it is cut into one, both are
    the same.

    Args:
        units: one sequence each.
        desirable: whether each answer is.

    Raises:
        UserError: there is but one answer.
    """

    def __init__(self, units: Sequence[Unit], config: TrainConfig, desirable: Sequence[bool]) -> None:
        super().__init__(map_sequences(units, only_answer, longest_lengths(units)), config)
        self.desirable = torch.tensor(list(desirable))
        prompts = [sequence.ids[: answer_start(sequence)] for (sequence,) in units]
        self.partner = mismatched_partners(prompts, config.batch_size)

    def prepare(self, lm: LanguageModel, folder: Path, *, padded: bool, parts: Iterable[Sequence[int]] = ()) -> None:
        self._padded, parts = padded, list(parts)
        others = UnitView(len(self.units), lambda row: [self.mismatched(row)])
        self.before = torch.cat(
            [
                reference_log_probs(lm, units, folder, self.tokens_at_once, padded=padded, parts=parts)
                for units in (self.units, others)
            ],
            1,
        )

    @torch.no_grad()
    def begin(self, lm: LanguageModel, parts: Sequence[Sequence[int]]) -> float:
        """Estimate the divergence; the step's answers."""
        found, before = [], []
        with evaluation_mode(lm.model):
            for rows in parts:
                units = [[self.mismatched(row)] for row in rows]
                found.append(sequence_log_probs(lm, pack(units, lm.device, padded=self._padded)))
                before.append(self._reference(rows, 1, found[-1]))
        self.divergence = kl_estimate(SequenceLogProbs.join(found), SequenceLogProbs.join(before))
        return float(sum(map(len, parts)))

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        found = sequence_log_probs(lm, packed)
        desirable = self.desirable[list(rows)].to(found.sums.device)
        reference = self._reference(rows, 0, found)
        return add_unit_losses(self.function(found, reference, desirable, self.divergence, self.settings), found)

    def mismatched(self, row: int) -> TokenizedExample:
        """A unit's prompt with its partner's answer."""
        (own,), (other,) = self.units[row], self.units[self.partner[row]]
        asked, said = own.ids[: answer_start(own)], other.ids[answer_start(other) :]
        marks = [False] * len(asked) + [True] * len(said)
        longest = self.config.max_length
        return TokenizedExample((asked + said)[-longest:], marks[-longest:])

    def _reference(self, rows: Sequence[int], side: int, policy: SequenceLogProbs) -> SequenceLogProbs:
        return SequenceLogProbs(self.before[list(rows), side].to(policy.sums.device), policy.counts)


def mismatched_partners(prompts: Sequence[Sequence[int]], size: int) -> list[int]:
    """Whose answer each prompt is given, so that every answer is given once: the one that stands before it, as in TRL.

    Like TRL's they come from groups of a step's size in the records' order, so that they stay the same in every epoch
    and the reference has to read them once. Where a prompt would meet its own answers, as in pairs that were split,
    the answers are moved on by more.

    Raises:
        UserError: there is but one prompt.
    """
    if len(prompts) < 2:
        raise UserError("kto compares answers with those to other prompts, and there is but one record")
    seen: dict[tuple[int, ...], int] = {}
    numbers = np.array([seen.setdefault(tuple(prompt), len(seen)) for prompt in prompts])
    found: list[int] = []
    while len(found) < len(numbers):
        start = len(found)
        end = min(start + max(size, 2), len(numbers))
        if end == len(numbers) - 1:  # the last one alone would have nobody
            end += 1
        group = numbers[start:end]
        met = [int((group == np.roll(group, by)).sum()) for by in range(1, len(group))]
        by = 1 + met.index(min(met))
        found += [start + (place - by) % len(group) for place in range(len(group))]
    return found
