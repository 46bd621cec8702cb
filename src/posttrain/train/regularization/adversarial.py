"""Adversarial training in embedding space: FGM and PGD."""

from dataclasses import replace

import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.train.data.loader import Batch
from posttrain.train.objectives.loss import Loss, merge_metrics
from posttrain.train.regularization.config import AdversarialConfig
from posttrain.train.regularization.embedding_noise import TokenSegments, transform_embeddings
from posttrain.train.step_hooks import MicroBatchPass, StepHook


class AdversarialTraining(StepHook):
    """Adds the loss of perturbed embeddings: the gradient is that of L(x) + L(x + r).

    ``fgm``: r goes as far as it may along the gradient g of the embedded tokens x, r = e |x| g / |g| (T. Miyato,
    A. Dai, I. Goodfellow, Adversarial Training Methods for Semi-Supervised Text Classification, 2017,
    arXiv:1605.07725, equations 5 and 6). ``pgd``: ``steps`` steps of e/2 |x| g / |g|, each put back into the ball of
    radius e |x| (A. Madry et al., 2018, arXiv:1706.06083, section 2.1; in embedding space as C. Zhu et al., FreeLB,
    2019, arXiv:1909.11764, algorithm 1, started at 0).

    Norms are those of a sequence. The paper's e is a length in a space whose embeddings were normalised first; here
    it is a share of |x|: 5 over 400 normalised embeddings of 256 channels is 0.016. Where sequences share a
    beginning, the shared and the other part are each held to that share, and so is each sequence. The embeddings'
    weights are not touched.

    Args:
        lm: the model.
        config: settings of the attack, ``fgm`` or ``pgd``.
    """

    def __init__(self, lm: LanguageModel, config: AdversarialConfig) -> None:
        self._lm, self._config = lm, config

    def backward(self, batch: Batch, number: int, run: MicroBatchPass, divisor: float) -> Loss:
        """Runs two passes with ``fgm``, ``steps + 1`` with ``pgd``.

        Returns:
            The plain loss, with the mean perturbed one as the metric ``adversarial``.
        """
        config, attack = self._config, _Perturbation(self._config)
        steps = config.steps if config.method == "pgd" else 1
        devices = [self._lm.device] if self._lm.device.type == "cuda" else []
        with transform_embeddings(self._lm, attack.add):
            with torch.random.fork_rng(devices):
                # Every pass of a micro-batch draws the same dropout and noise, as in FreeLB.
                plain = run(divisor)
            for _ in range(steps - 1):
                attack.climb()
                with torch.random.fork_rng(devices):
                    run(divisor, inputs=attack.perturbations)
            attack.climb(last=True)
            worst = run(divisor)
        return replace(plain, metrics=merge_metrics([plain.metrics, {"adversarial": (worst.sum, worst.count)}]))


class _Perturbation:
    """The perturbations of one micro-batch, one for each call of the embedding layer."""

    def __init__(self, config: AdversarialConfig) -> None:
        self.epsilon = config.epsilon  # relative, so that it means the same in every model and at every length
        self.step = config.epsilon / 2 if config.method == "pgd" else config.epsilon
        self.perturbations: list[Tensor] = []  # float32 [B, T, D]
        self._rows: list[TokenSegments] = []
        self._sizes: list[Tensor] = []  # norm of what is perturbed, by piece
        self._number = 0

    def add(self, embedded: Tensor, rows: TokenSegments) -> Tensor:
        if self._number == len(self.perturbations):
            nothing = torch.zeros(embedded.shape, dtype=torch.float32, device=embedded.device)
            self.perturbations.append(nothing.requires_grad_())
            self._rows.append(rows)
            self._sizes.append(rows.norms(embedded))
        self._number += 1
        return embedded + self.perturbations[self._number - 1].to(embedded.dtype)

    @torch.no_grad()
    def climb(self, *, last: bool = False) -> None:
        """Steps along the gradients of the previous pass; ``last`` if no further gradients are needed."""
        self._number = 0
        for index, (before, rows, size) in enumerate(zip(self.perturbations, self._rows, self._sizes, strict=True)):
            if before.grad is None:
                continue
            # A gradient that is 0, or has overflowed, has no direction.
            along = before.grad.nan_to_num(0.0, 0.0, 0.0)
            # One step of a |x| g / |g|; for FGM, which starts at 0, with a = e.
            after = before + along * rows.spread(_safe_divide(self.step * size, rows.norms(along)))
            # Back into the ball of radius e |x|: only what lies outside is scaled, hence the bound of 1.
            after *= rows.spread(_safe_divide(self.epsilon * size, rows.norms(after)).clamp(max=1))
            self.perturbations[index] = after.requires_grad_(not last)


def _safe_divide(length: Tensor, norm: Tensor) -> Tensor:
    """Returns length / norm, and 0 where the norm is 0."""
    return torch.where(norm > 0, length / norm, 0.0)
