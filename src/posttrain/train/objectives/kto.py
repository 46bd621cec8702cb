"""Kahneman-Tversky optimisation: answers that are desirable or not, in no pairs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit, pack
from posttrain.store.errors import UserError
from posttrain.train.data.token_set import longest_lengths
from posttrain.train.data.units import UnitView, answer_start, map_sequences, only_answer, split_units
from posttrain.train.objectives.base import Objective, ObjectiveInputs, TrainArguments, evaluation_mode
from posttrain.train.objectives.config import KtoConfig
from posttrain.train.objectives.loss import Loss, SequenceLogProbs, log_ratios, sequence_log_probs
from posttrain.train.objectives.reference import reference_log_probs


def kto(
    policy: SequenceLogProbs, reference: SequenceLogProbs, desirable: Tensor, kl: Tensor, config: KtoConfig
) -> Loss:
    """Weight times 1 - sigmoid(beta (h - kl)) for a desirable answer, 1 - sigmoid(beta (kl - h)) for another.

    K. Ethayarajh et al., KTO: Model Alignment as Prospect Theoretic Optimization, 2024, arXiv:2402.01306,
    equation 7 (TRL: KTOTrainer, ``kto``). h = ln pi(y|x)/ref(y|x) is an answer's log-ratio. The mean is over
    answers, not over their weights.

    Args:
        desirable: bool [N].
        kl: scalar float32, ``kl_estimate`` of the whole optimiser step; below 0 it counts as 0, and it gets no
            gradient.

    Raises:
        ValueError: the answers, the reference and the marks are not equally many.
    """
    ratios = log_ratios(policy, reference)
    if desirable.shape != ratios.shape:
        raise ValueError(f"{list(desirable.shape)} marks do not go with {len(policy)} answers")
    # As in the paper, z0 gets no gradient: it only shifts where the sigmoid saturates. A divergence is never negative,
    # but its estimate from a few answers may be.
    kl = kl.detach().clamp(min=0)
    gains = torch.where(desirable, ratios - kl, kl - ratios)
    weights = torch.full_like(ratios, config.undesirable_weight).masked_fill(desirable, config.desirable_weight)
    # lambda - v(x, y) of equation 7.
    losses = weights * torch.sigmoid(-config.beta * gains)  # 1 - sigmoid(x), without losing digits
    return Loss(losses.sum(), float(len(policy)), _metrics(policy.sums, config.beta * ratios, desirable, kl))


def kl_estimate(policy: SequenceLogProbs, reference: SequenceLogProbs) -> Tensor:
    """Scalar float32 without graph: KTO's point of reference z0, at least 0, nats.

    The mean log-ratio of mismatched pairs (each prompt with another's answer), as the paper and TRL estimate it.

    Args:
        policy, reference: all mismatched pairs of an optimiser step, so that how it is cut does not matter. TRL
            takes one micro-batch's.
    """
    ratios = log_ratios(policy, reference).detach()
    return (ratios.sum() / max(len(policy), 1)).clamp(min=0)


def _metrics(logps: Tensor, rewards: Tensor, desirable: Tensor, kl: Tensor) -> dict[str, tuple[Tensor, float]]:
    # Sums and counts, not means: a micro-batch may hold no desirable answer at all.
    good = float(desirable.sum())
    metrics = {"kl": (kl * len(rewards), float(len(rewards)))}
    for name, mask, count in (("chosen", desirable, good), ("rejected", ~desirable, len(rewards) - good)):
        metrics[f"rewards/{name}"] = (rewards.detach().where(mask, 0.0).sum(), count)
        metrics[f"logps/{name}"] = (logps.detach().where(mask, 0.0).sum(), count)
    return metrics


class KtoObjective(Objective):
    """``kto``: compares each answer with the reference, shifted by an estimate of the policy's divergence from it.

    Args:
        units: one sequence each.
        desirable: True for each desirable answer.

    Raises:
        UserError: there is only one answer.
    """

    formula = staticmethod(kto)

    def __init__(self, units: Sequence[Unit], config: TrainArguments, desirable: Sequence[bool]) -> None:
        super().__init__(map_sequences(units, only_answer, longest_lengths(units)), config)
        self.desirable = torch.tensor(list(desirable))
        prompts = [sequence.ids[: answer_start(sequence)] for (sequence,) in units]
        self.partner = mismatched_partners(prompts, config.batch_size)

    @classmethod
    def from_inputs(cls, inputs: ObjectiveInputs) -> Self:
        paired = len(inputs.units[0]) == 2
        desirable = [True, False] * len(inputs.units) if paired else [target == 1 for target in inputs.targets]
        return cls(cls.record_units(inputs.units), inputs.config, desirable)

    @classmethod
    def record_units(cls, units: Sequence[Unit]) -> Sequence[Unit]:
        """Splits pairs into a desirable and an undesirable answer each, as TRL does."""
        return units if len(units[0]) == 1 else split_units(units)

    def prepare(self, lm: LanguageModel, folder: Path, *, padded: bool, groups: Iterable[Sequence[int]] = ()) -> None:
        # Column 0: each prompt with its own answer. Column 1: with its partner's, for the estimate of z0.
        self._padded, groups = padded, list(groups)
        mismatched = UnitView(len(self.units), lambda row: [self.mismatched(row)])
        self.reference = torch.cat(
            [
                reference_log_probs(lm, units, folder, self.inference_tokens, padded=padded, groups=groups)
                for units in (self.units, mismatched)
            ],
            1,
        )

    @torch.no_grad()
    def begin_step(self, lm: LanguageModel, groups: Sequence[Sequence[int]]) -> float:
        """Estimates the divergence on mismatched pairs, and counts the step's answers."""
        # Of the whole step. TRL estimates it on each micro-batch, which changes the gradient with how a step is cut.
        policy, reference = [], []
        # As the reference was read: dropout alone would make the two diverge.
        with evaluation_mode(lm.model):
            for rows in groups:
                units = [[self.mismatched(row)] for row in rows]
                policy.append(sequence_log_probs(lm, pack(units, lm.device, padded=self._padded)))
                reference.append(self._reference(rows, 1, policy[-1]))
        self.divergence = kl_estimate(SequenceLogProbs.join(policy), SequenceLogProbs.join(reference))
        return float(sum(map(len, groups)))

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        policy = sequence_log_probs(lm, packed)
        desirable = self.desirable[list(rows)].to(policy.sums.device)
        reference = self._reference(rows, 0, policy)
        return self.formula(policy, reference, desirable, self.divergence, self.settings)

    def mismatched(self, row: int) -> TokenizedExample:
        """Joins a unit's prompt with its partner's answer."""
        (own,), (partner,) = self.units[row], self.units[self.partner[row]]
        prompt, answer = own.ids[: answer_start(own)], partner.ids[answer_start(partner) :]
        supervised = [False] * len(prompt) + [True] * len(answer)
        longest = self.config.max_length
        # Cut at the front, so that the answer, whose log-probability is read, stays whole.
        return TokenizedExample((prompt + answer)[-longest:], supervised[-longest:])

    def _reference(self, rows: Sequence[int], column: int, policy: SequenceLogProbs) -> SequenceLogProbs:
        return SequenceLogProbs(self.reference[list(rows), column].to(policy.sums.device), policy.counts)


def mismatched_partners(prompts: Sequence[Sequence[int]], size: int) -> list[int]:
    """Chooses for each prompt the record whose answer it is given: the one before it, as in TRL.

    Like TRL's they come from groups of a step's size in the records' order, so that they stay the same in every epoch
    and the reference has to read them once. Every answer is given once.

    Raises:
        UserError: there is only one prompt.
    """
    if len(prompts) < 2:
        raise UserError("kto compares answers with those to other prompts, and there is but one record")
    seen: dict[tuple[int, ...], int] = {}
    # By content: two records with one prompt must not be each other's mismatch.
    numbers = np.array([seen.setdefault(tuple(prompt), len(seen)) for prompt in prompts])
    partners: list[int] = []
    while len(partners) < len(numbers):
        start = len(partners)
        end = min(start + max(size, 2), len(numbers))
        if end == len(numbers) - 1:  # the last one alone would have no partner
            end += 1
        group = numbers[start:end]
        # Pairs that were split stand next to each other: a shift by 1 would give a prompt its own answers.
        same = [int((group == np.roll(group, shift)).sum()) for shift in range(1, len(group))]
        shift = 1 + same.index(min(same))
        partners += [start + (row - shift) % len(group) for row in range(len(group))]
    return partners
