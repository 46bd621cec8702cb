"""Per-record losses, and square roots of their Hessians in the model's outputs."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from posttrain.attribution.influence.functional_model import Batch

IGNORE_INDEX = -100
"""The target of positions that do not count, as in torch's ``cross_entropy``."""


@runtime_checkable
class GaussNewtonLoss(Protocol):
    """A loss whose Hessian in the outputs has a cheap square root, for the Gauss-Newton matrix."""

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the loss [B] of each record."""
        ...

    def roots(self, outputs: Tensor, batch: Batch, samples: int | None, generator: torch.Generator | None) -> Tensor:
        """Returns vectors whose outer products add up to the Hessian of each record's loss in its outputs.

        Args:
            outputs: [B, ...].
            samples: number of draws, for a sum that is right on average; None for the exact sum.
            generator: makes the draws.

        Returns:
            [R, B, ...].
        """
        ...


class CrossEntropy:
    """Softmax cross-entropy of logits [B, K] or [B, T, K] and classes [B] or [B, T], which end the batch, in nats.

    A record's positions are summed; positions whose target is `IGNORE_INDEX` do not count.
    """

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        targets = batch[-1]
        # In float32: a log-softmax of bfloat16 logits keeps 8 bits.
        logs = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        chosen = logs.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        losses = torch.where(targets == IGNORE_INDEX, torch.zeros_like(chosen), -chosen)
        return losses.flatten(1).sum(1) if losses.dim() > 1 else losses

    def roots(self, outputs: Tensor, batch: Batch, samples: int | None, generator: torch.Generator | None) -> Tensor:
        """Computes roots as `GaussNewtonLoss` specifies.

        The Hessian is diag(p) - p p'. Exactly, its root has the columns sqrt(p_k) (e_k - p); sampled, a column is
        e_y - p of a class y drawn from p, whose outer product is the Hessian on average (R. Grosse et al. 2023,
        arXiv:2308.03296, section 2.2: the model's own labels, not those of the records). Exact roots take outputs
        [B, K].

        Raises:
            ValueError: exact roots of outputs [B, T, K], which are too many.
        """
        p = outputs.detach().softmax(-1)
        if samples is None:
            if p.dim() != 2:
                raise ValueError("exact roots take outputs [B, K]; draw some")
            unit = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
            exact: Tensor = p.T.sqrt()[:, :, None] * (unit[:, None] - p)
            return exact
        flat = p.flatten(0, -2)
        classes = torch.multinomial(flat, samples, replacement=True, generator=generator).T
        residuals = torch.nn.functional.one_hot(classes, p.shape[-1]).to(p.dtype).view(samples, *p.shape) - p
        counted = (batch[-1] != IGNORE_INDEX).to(p.dtype).unsqueeze(-1)
        scaled: Tensor = residuals * counted / samples**0.5
        return scaled
