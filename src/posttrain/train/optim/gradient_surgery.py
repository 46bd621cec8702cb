"""Gradient surgery: combines the gradients of several tasks where their sum would have one undo another.

PCGrad needs the gradients' inner products alone: it is a function of the Gram matrix, in float64, that returns a
coefficient for each task's gradient. A task's gradient is that of its own mean loss in the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from posttrain.train.data.loader import Batch
from posttrain.train.monitor.meter import phase
from posttrain.train.objectives.loss import Loss, merge_metrics
from posttrain.train.optim.weights import Weights
from posttrain.train.step_hooks import MicroBatchPass, StepHook

_BLOCK = 1 << 20  # elements of each gradient that are converted to float64 at a time


class GradientSurgery(StepHook):
    """Keeps the tasks' gradients of a step apart, and combines them in place of their sum.

    Tasks come one after another: `set_aside` moves a task's gradient out of the sums before the next one begins, and
    `combine` replaces the last one's by the combination. Nothing is kept from step to step. Memory: a float32 copy of
    the gradient for each task of a step but one.

    Args:
        weights: owner of the gradient sums.
        seed: seed of PCGrad's random orders.
        names: the tasks' names.
    """

    def __init__(self, weights: Weights, seed: int, names: Sequence[str]) -> None:
        self.names = list(names)
        self._weights, self._seed = weights, seed
        self._kept: list[list[Tensor]] = []
        self._counts: dict[int, float] = {}  # by task, of the step so far

    @contextmanager
    def gradients(self, batch: Batch) -> Iterator[None]:
        self._counts = {}
        yield
        with phase("surgery"):
            total = sum(self._counts.values()) or 1.0
            self.metrics = self.combine(batch.step, [count / total for count in self._counts.values()])

    def backward(self, batch: Batch, number: int, run: MicroBatchPass, divisor: float) -> Loss:
        task = batch.tasks[number]
        if self._counts and task not in self._counts:
            with phase("surgery"):
                self.set_aside(len(self._counts) - 1)  # micro-batches come task by task
        loss = run(divisor)
        self._counts[task] = self._counts.get(task, 0.0) + loss.count
        own = {f"loss/{self.names[task]}": (loss.sum, loss.count)}
        return replace(loss, metrics=merge_metrics([loss.metrics, own]))

    @torch.no_grad()
    def set_aside(self, number: int) -> None:
        """Moves the sums to task ``number`` of the step, from 0 in the order in which they come, and clears them."""
        sums = self._weights.finished_sums()
        if len(self._kept) <= number:
            self._kept.append([torch.empty_like(total) for total in sums])
        torch._foreach_copy_(self._kept[number], sums)
        self._weights.zero_grad()

    @torch.no_grad()
    def combine(self, step: int, shares: Sequence[float]) -> dict[str, float]:
        """Replaces the sums by the combination of all tasks' gradients.

        A step of one task keeps its gradient. NaN and infinite gradients are summed, so that the loss scaler and the
        monitor see them.

        Args:
            step: number of the optimiser step; PCGrad's random orders depend on it and on the seed alone.
            shares: each task's part of the count that the step's loss is divided by, in the order of `set_aside`, the
                last one's gradient being in the sums.

        Returns:
            ``gradient_conflicts``, the share of the pairs of tasks whose gradients have a negative cosine, and
            ``gradient_cosine``, the mean over these pairs; empty without two gradients that are not 0.
        """
        sums = self._weights.finished_sums()
        kept = self._kept[: len(shares) - 1]
        # Tasks without anything that counts, as where all their tokens were cut off, have no loss and no gradient.
        counted = [number for number, share in enumerate(shares) if share > 0]
        coefficients, metrics = np.ones(len(shares)), {}
        if len(counted) > 1:
            # The sums hold each task's part of the step's mean loss: divided by its share, it is the task's own mean.
            parts = np.array(shares)[counted]
            gradients = [[*kept, sums][number] for number in counted]
            gram = gram_matrix(gradients) / np.outer(parts, parts)
            if np.isfinite(gram).all():
                # Zeros set these draws apart from those of the batch sampler, which have the same seed.
                generator = np.random.default_rng([self._seed, step, 0, 0, 0, 0, 2])
                coefficients[counted] = pcgrad(gram, parts, generator) / parts
                metrics = conflict_metrics(gram)
        if coefficients[-1] != 1:
            torch._foreach_mul_(sums, float(coefficients[-1]))
        for gradient, coefficient in zip(kept, coefficients, strict=False):
            torch._foreach_add_(sums, gradient, alpha=float(coefficient))
        return metrics


def gram_matrix(gradients: Sequence[Sequence[Tensor]]) -> np.ndarray:
    """float64 [T, T], the inner products of T gradients, which are lists of tensors of the same shapes."""
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64, device=gradients[0][0].device)
    for tensors in zip(*gradients, strict=True):
        flat = [tensor.reshape(-1) for tensor in tensors]
        # In blocks, as a float64 copy of the largest weight's gradients would be twice their size.
        for start in range(0, flat[0].numel(), _BLOCK):
            block = torch.stack([values[start : start + _BLOCK] for values in flat]).double()
            total += block @ block.T
    return total.cpu().numpy()


def conflict_metrics(gram: np.ndarray) -> dict[str, float]:
    """Returns the metrics of `GradientSurgery.combine`."""
    norms = np.sqrt(gram.diagonal())
    known = norms > 0
    rows, columns = np.triu_indices(int(known.sum()), 1)
    if not len(rows):
        return {}
    cosines = (gram[np.ix_(known, known)] / np.outer(norms[known], norms[known]))[rows, columns]
    return {"gradient_conflicts": float((cosines < 0).mean()), "gradient_cosine": float(cosines.mean())}


def pcgrad(gram: np.ndarray, weights: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Returns the coefficients of PCGrad, float64 [T].

    T. Yu et al., Gradient Surgery for Multi-Task Learning, 2020, arXiv:2001.06782, algorithm 1: from each task's
    gradient, its component along each other task's gradient that it conflicts with is taken away, the others in random
    order. The result is sum_i w_i g_i^PC, with the weights that training without surgery gives the tasks; the paper's
    sum over tasks is T times that with w_i = 1/T. Without a conflict it is sum_i w_i g_i.

    Args:
        gram: float64 [T, T], inner products of the tasks' gradients g_i.
        weights: float64 [T], w_i.
        generator: draws the orders.
    """
    total = np.zeros(len(gram))
    for task, weight in enumerate(weights):
        own = np.zeros(len(gram))  # coefficients of g_i^PC
        own[task] = 1.0
        for other in generator.permutation(len(gram)):
            # A gradient of 0 conflicts with none, so that nothing is divided by 0.
            if other != task and (product := own @ gram[:, other]) < 0:
                own[other] -= product / gram[other, other]
        total += weight * own
    return total
