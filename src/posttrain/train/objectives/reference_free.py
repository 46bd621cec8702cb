"""Objectives over pairs that need no reference model.

Some add the negative log-likelihood of the chosen answers, which is a mean over tokens, to a mean over pairs. To
keep both in one sum, a pair's likelihood is divided by ``tokens_per_pair``: the tokens of the likelihood in the
whole optimiser step by its pairs. Left out, it is taken from the pairs at hand, which is right when they are the
whole step. ``row_weights``, float32 [N], are what each pair and its tokens count; 1 each when left out.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from posttrain.models.head import predicting_states, token_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, Unit
from posttrain.train.data.token_set import count_supervised, longest_lengths
from posttrain.train.data.units import UnitView, whole_text
from posttrain.train.objectives.base import Objective, TrainArguments
from posttrain.train.objectives.config import CpoConfig, OrpoConfig, SimpoConfig
from posttrain.train.objectives.loss import (
    Loss,
    SequenceLogProbs,
    apply_row_weights,
    check_same_length,
    select_row_weights,
    sequence_log_probs,
    sum_by_sequence,
    weighted_count,
)
from posttrain.train.objectives.pairs import logistic, pair_loss, split_pairs


def orpo(
    chosen: SequenceLogProbs,
    rejected: SequenceLogProbs,
    config: OrpoConfig,
    *,
    likelihood: SequenceLogProbs | None = None,
    tokens_per_pair: float | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """Odds-ratio preference optimisation: NLL(chosen) - beta ln sigmoid(ln odds(chosen) - ln odds(rejected)).

    J. Hong, N. Lee, J. Thorne, ORPO: Monolithic Preference Optimization without Reference Model, 2024,
    arXiv:2403.07691, equations 4, 6 and 7. odds = p / (1-p) with p the geometric mean of the tokens' probabilities;
    beta is the paper's lambda. As in TRL (ORPOTrainer) rewards and ``logps`` are those a token.

    Args:
        likelihood: the sequences whose likelihood is learned: the chosen texts with their prompts where
            ``config.likelihood`` is ``text``, as in TRL and the authors' code; the chosen answers when left out.
        tokens_per_pair, row_weights: see above.
    """
    check_same_length(chosen, rejected)
    won, lost = chosen.means, rejected.means
    apart = _log_odds(won) - _log_odds(lost)
    losses = -config.beta * functional.logsigmoid(apart)
    odds = pair_loss(losses, config.beta * won, config.beta * lost, won, lost, row_weights)
    odds = Loss(odds.sum, odds.count, {**odds.metrics, "log_odds": (apart.detach().sum(), float(len(apart)))})
    return _plus_nll(odds, chosen if likelihood is None else likelihood, len(apart), 1.0, tokens_per_pair, row_weights)


def simpo(
    chosen: SequenceLogProbs,
    rejected: SequenceLogProbs,
    config: SimpoConfig,
    *,
    tokens_per_pair: float | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """Simple preference optimisation: -ln sigmoid(beta (m(chosen) - m(rejected)) - gamma), m the mean a token.

    Y. Meng, M. Xia, D. Chen, SimPO: Simple Preference Optimization with a Reference-Free Reward, 2024,
    arXiv:2405.14734, equation 6. TRL has it as CPOTrainer's ``simpo`` with ``cpo_alpha=0``; with
    ``nll_weight`` it is TRL's CPO-SimPO.
    """
    check_same_length(chosen, rejected)
    won, lost = config.beta * chosen.means, config.beta * rejected.means
    losses = logistic(won - lost - config.gamma, config.label_smoothing)
    loss = pair_loss(losses, won, lost, chosen.means, rejected.means, row_weights)
    return _plus_nll(loss, chosen, len(losses), config.nll_weight, tokens_per_pair, row_weights)


def cpo(
    chosen: SequenceLogProbs,
    rejected: SequenceLogProbs,
    config: CpoConfig,
    *,
    tokens_per_pair: float | None = None,
    row_weights: Tensor | None = None,
) -> Loss:
    """Contrastive preference optimisation: -ln sigmoid(beta (s(chosen) - s(rejected))) + NLL(chosen), s the sum.

    H. Xu et al., Contrastive Preference Optimization, 2024, arXiv:2401.08417, equation 3 (TRL: CPOTrainer).
    """
    check_same_length(chosen, rejected)
    won, lost = config.beta * chosen.sums, config.beta * rejected.sums
    losses = logistic(won - lost, config.label_smoothing)
    loss = pair_loss(losses, won, lost, chosen.sums, rejected.sums, row_weights)
    return _plus_nll(loss, chosen, len(losses), config.nll_weight, tokens_per_pair, row_weights)


def _log_odds(logps: Tensor) -> Tensor:
    """ln p/(1-p) from ln p; p that rounds to 1 counts as the largest number below 1."""
    logps = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    return logps - torch.log(-torch.expm1(logps))


def _plus_nll(
    loss: Loss,
    likelihood: SequenceLogProbs,
    pairs: int,
    weight: float,
    tokens_per_pair: float | None,
    row_weights: Tensor | None,
) -> Loss:
    """The loss of N pairs and the likelihood of N texts, scaled so that its mean over pairs is that over tokens."""
    if weight == 0:
        return loss
    if len(likelihood) != pairs:
        raise ValueError(f"{len(likelihood)} texts do not go with {pairs} pairs")
    nll = -apply_row_weights(likelihood.sums, row_weights).sum()
    if tokens_per_pair is None:
        nll = nll * loss.count / (float(apply_row_weights(likelihood.counts, row_weights).sum()) or 1.0)
    else:
        nll = nll / tokens_per_pair
    return loss.plus(Loss(nll, loss.count, {"nll": (nll.detach(), loss.count)}), weight)


class ReferenceFreeObjective(Objective):
    """Scores pairs under the policy alone, and may add the chosen answers' likelihood, a mean over tokens."""

    tokens_per_pair = 1.0

    def begin_step(self, lm: LanguageModel, groups: Sequence[Sequence[int]]) -> float:
        """Counts the step's pairs, by their weights."""
        rows = [row for group in groups for row in group]
        tokens = weighted_count(self.weights, rows, [count_supervised(self.units[row][0]) for row in rows])
        pairs = super().begin_step(lm, groups)
        # Of the whole step, not of a micro-batch: the gradient must not depend on how the step is cut.
        self.tokens_per_pair = (tokens or 1.0) / (pairs or 1.0)
        return pairs

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        chosen, rejected = split_pairs(sequence_log_probs(lm, packed))
        loss = self.formula(
            chosen,
            rejected,
            self.settings,
            tokens_per_pair=self.tokens_per_pair,
            row_weights=select_row_weights(self.weights, rows, chosen.sums),
        )
        return loss


class SimpoObjective(ReferenceFreeObjective):
    """``simpo``."""

    formula = staticmethod(simpo)


class CpoObjective(ReferenceFreeObjective):
    """``cpo``."""

    formula = staticmethod(cpo)


class OrpoObjective(ReferenceFreeObjective):
    """``orpo``, whose likelihood may be that of the chosen text with its prompt."""

    formula = staticmethod(orpo)

    def __init__(self, units: Sequence[Unit], config: TrainArguments) -> None:
        self.answers = units
        super().__init__(units, config)
        self.units = UnitView(
            len(units), lambda row: self.mark_supervised(self.answers[row], self.settings), longest_lengths(units)
        )

    @classmethod
    def mark_supervised(cls, unit: Unit, settings: OrpoConfig) -> Unit:
        """Supervises the prompt too, if its likelihood is learned."""
        if settings.likelihood == "completion":
            return unit
        # In the chosen sequence only, so that the pair cannot share the prompt's tokens.
        chosen, rejected = unit
        return [whole_text(chosen), rejected]

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        tokens = token_log_probabilities(lm, predicting_states(lm, packed), packed.targets)
        chosen, rejected = split_pairs(sum_by_sequence(tokens, packed, self._in_answer(rows).to(tokens.device)))
        texts, _ = split_pairs(sum_by_sequence(tokens, packed))
        loss = self.formula(
            chosen,
            rejected,
            self.settings,
            likelihood=texts,
            tokens_per_pair=self.tokens_per_pair,
            row_weights=select_row_weights(self.weights, rows, chosen.sums),
        )
        return loss

    def _in_answer(self, rows: Sequence[int]) -> Tensor:
        """bool [S]: which of the supervised tokens belong to an answer."""
        marks: list[bool] = []
        for row in rows:
            for learned, answer in zip(self.units[row], self.answers[row], strict=True):
                pairs = zip(learned.supervised[1:], answer.supervised[1:], strict=True)
                marks += [in_answer for supervised, in_answer in pairs if supervised]
        return torch.tensor(marks, dtype=torch.bool)
