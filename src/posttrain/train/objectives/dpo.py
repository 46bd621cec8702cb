"""DPO and its kin: objectives over pairs that compare the policy with a reference.

With h = ln pi(y|x)/ref(y|x), the log-ratio of a whole answer, d = h(chosen) - h(rejected) and rewards beta h.
The loss is a mean over pairs; ``row_weights``, float32 [N], are what each counts in it, 1 each when left out. TRL 1.16
has the same in its DPOTrainer, under the ``loss_type`` that is named.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.config import DpoConfig, HingeConfig, IpoConfig, RobustDpoConfig
from posttrain.train.objectives.loss import (
    Loss,
    SequenceLogProbs,
    check_same_length,
    log_ratios,
    select_row_weights,
    sequence_log_probs,
)
from posttrain.train.objectives.pairs import logistic, pair_loss, split_pairs
from posttrain.train.objectives.reference import reference_log_probs


def dpo(
    chosen: SequenceLogProbs,
    rejected: SequenceLogProbs,
    reference_chosen: SequenceLogProbs,
    reference_rejected: SequenceLogProbs,
    config: DpoConfig,
    *,
    row_weights: Tensor | None = None,
) -> Loss:
    """Direct preference optimisation: -ln sigmoid(beta d) (``sigmoid``).

    R. Rafailov et al., Direct Preference Optimization, 2023, arXiv:2305.18290, equation 7. With label smoothing e
    it is the conservative DPO of E. Mitchell, A note on DPO with noisy preferences & relationship to IPO, 2023
    (no arXiv id; https://ericmitchell.ai/cdpo.pdf): -(1-e) ln sigmoid(beta d) - e ln sigmoid(-beta d).
    """
    won, lost = _ratios(chosen, rejected, reference_chosen, reference_rejected)
    losses = logistic(config.beta * (won - lost), config.label_smoothing)
    return pair_loss(losses, config.beta * won, config.beta * lost, chosen.sums, rejected.sums, row_weights)


def robust_dpo(
    chosen: SequenceLogProbs,
    rejected: SequenceLogProbs,
    reference_chosen: SequenceLogProbs,
    reference_rejected: SequenceLogProbs,
    config: RobustDpoConfig,
    *,
    row_weights: Tensor | None = None,
) -> Loss:
    """DPO whose mean over labels that are flipped with probability e is DPO's over right ones (``robust``).

    S. R. Chowdhury, A. Kini, N. Natarajan, Provably Robust DPO, 2024, arXiv:2403.00409, section 3.1:
    (-(1-e) ln sigmoid(beta d) + e ln sigmoid(-beta d)) / (1-2e). It has no lower bound.
    """
    won, lost = _ratios(chosen, rejected, reference_chosen, reference_rejected)
    logits, flipped = config.beta * (won - lost), config.label_smoothing
    losses = ((1 - flipped) * logistic(logits) - flipped * logistic(-logits)) / (1 - 2 * flipped)
    return pair_loss(losses, config.beta * won, config.beta * lost, chosen.sums, rejected.sums, row_weights)


def ipo(
    chosen: SequenceLogProbs,
    rejected: SequenceLogProbs,
    reference_chosen: SequenceLogProbs,
    reference_rejected: SequenceLogProbs,
    config: IpoConfig,
    *,
    row_weights: Tensor | None = None,
) -> Loss:
    """Identity preference optimisation: (d - 1 / (2 beta))^2, beta being the paper's tau (``ipo``).

    M. G. Azar et al., A General Theoretical Paradigm to Understand Learning from Human Preferences, 2023,
    arXiv:2310.12036, equation 17. As in TRL, which asked the authors, d is the difference of log-ratios *a token*;
    the paper does not say so. The rewards are those of whole answers all the same, as in TRL.
    """
    won, lost = _ratios(chosen, rejected, reference_chosen, reference_rejected)
    apart = won / chosen.counts.clamp(min=1) - lost / rejected.counts.clamp(min=1)
    losses = (apart - 1 / (2 * config.beta)).square()
    return pair_loss(losses, config.beta * won, config.beta * lost, chosen.sums, rejected.sums, row_weights)


def hinge(
    chosen: SequenceLogProbs,
    rejected: SequenceLogProbs,
    reference_chosen: SequenceLogProbs,
    reference_rejected: SequenceLogProbs,
    config: HingeConfig,
    *,
    row_weights: Tensor | None = None,
) -> Loss:
    """max(0, 1 - beta d): SLiC's calibration loss on DPO's rewards (``hinge``).

    Y. Zhao et al., SLiC-HF, 2023, arXiv:2305.10425, without the reference; with it, T. Liu et al., Statistical
    Rejection Sampling Improves Preference Optimization, 2023, arXiv:2309.06657, its ``hinge-norm``.
    """
    won, lost = _ratios(chosen, rejected, reference_chosen, reference_rejected)
    losses = (1 - config.beta * (won - lost)).relu()
    return pair_loss(losses, config.beta * won, config.beta * lost, chosen.sums, rejected.sums, row_weights)


def _ratios(
    chosen: SequenceLogProbs,
    rejected: SequenceLogProbs,
    reference_chosen: SequenceLogProbs,
    reference_rejected: SequenceLogProbs,
) -> tuple[Tensor, Tensor]:
    check_same_length(chosen, rejected)
    return log_ratios(chosen, reference_chosen), log_ratios(rejected, reference_rejected)


class ReferencePairObjective(Objective):
    """Compares the policy with the reference: the model before its first step."""

    def prepare(self, lm: LanguageModel, folder: Path, *, padded: bool, groups: Iterable[Sequence[int]] = ()) -> None:
        # Computed once and not with the adapter switched off in each step: that would read every pair once an epoch.
        self.reference = reference_log_probs(
            lm, self.units, folder, self.inference_tokens, padded=padded, groups=groups
        )

    def loss(self, lm: LanguageModel, packed: Packed, rows: Sequence[int]) -> Loss:
        chosen, rejected = split_pairs(sequence_log_probs(lm, packed))
        reference = self.reference[list(rows)].to(chosen.sums.device)
        loss = self.formula(
            chosen,
            rejected,
            SequenceLogProbs(reference[:, 0], chosen.counts),
            SequenceLogProbs(reference[:, 1], rejected.counts),
            self.settings,
            row_weights=select_row_weights(self.weights, rows, chosen.sums),
        )
        return loss


class DpoObjective(ReferencePairObjective):
    """``dpo``."""

    formula = staticmethod(dpo)


class RobustDpoObjective(ReferencePairObjective):
    """``robust_dpo``."""

    formula = staticmethod(robust_dpo)


class IpoObjective(ReferencePairObjective):
    """``ipo``."""

    formula = staticmethod(ipo)


class HingeObjective(ReferencePairObjective):
    """``hinge``."""

    formula = staticmethod(hinge)
