"""Gradient surgery: combines the gradients of several tasks where their sum would have one undo another.

PCGrad, CAGrad and MGDA need the gradients' inner products alone: each is a function of the Gram matrix, in float64,
that returns a coefficient for each task's gradient. A task's gradient is that of its own mean loss in the step.
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
from posttrain.train.optim.config import SurgeryConfig
from posttrain.train.optim.weights import Weights
from posttrain.train.step_hooks import MicroBatchPass, StepHook

_DISTANCE = 0.5  # of CAGrad's step from the mean gradient at most, as a share of its norm

_BLOCK = 1 << 20  # elements of each gradient that are converted to float64 at a time
_LEAST_RATIO = 1e-6  # of two norms: what is shorter is the rounding of float32 gradients


class GradientSurgery(StepHook):
    """Keeps the tasks' gradients of a step apart, and combines them in place of their sum.

    Tasks come one after another: `set_aside` moves a task's gradient out of the sums before the next one begins, and
    `combine` replaces the last one's by the combination. Nothing is kept from step to step. Memory: a float32 copy of
    the gradient for each task of a step but one.

    Args:
        weights: owner of the gradient sums.
        config: the method and its options.
        seed: seed of PCGrad's random orders.
        names: the tasks' names.
    """

    def __init__(self, weights: Weights, config: SurgeryConfig, seed: int, names: Sequence[str]) -> None:
        self.names = list(names)
        self._weights, self._config, self._seed = weights, config, seed
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
                coefficients[counted] = self._coefficients(gram, parts, step) / parts
                metrics = conflict_metrics(gram)
        if coefficients[-1] != 1:
            torch._foreach_mul_(sums, float(coefficients[-1]))
        for gradient, coefficient in zip(kept, coefficients, strict=False):
            torch._foreach_add_(sums, gradient, alpha=float(coefficient))
        return metrics

    def _coefficients(self, gram: np.ndarray, weights: np.ndarray, step: int) -> np.ndarray:
        if self._config.method == "pcgrad":
            # Zeros set these draws apart from those of the batch sampler, which have the same seed.
            return pcgrad(gram, weights, np.random.default_rng([self._seed, step, 0, 0, 0, 0, 2]))
        return cagrad(gram, weights, _DISTANCE) if self._config.method == "cagrad" else min_norm_weights(gram)


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


def cagrad(gram: np.ndarray, weights: np.ndarray, c: float) -> np.ndarray:
    """Returns the coefficients of CAGrad, float64 [T].

    B. Liu et al., Conflict-Averse Gradient Descent for Multi-task Learning, 2021, arXiv:2110.14048, algorithm 1: the
    direction d within c |g_0| of the mean g_0 = sum_i w_i g_i that maximises min_i d.g_i. It is
    g_0 + sqrt(phi) g_v / |g_v|, where phi = c^2 |g_0|^2 and v minimises g_v.g_0 + sqrt(phi) |g_v| over the simplex,
    g_v = sum_i v_i g_i. The paper's w_i is 1/T. The authors' code also divides by 1 + c; this does not.

    The minimum is found through k = |g_v| / sqrt(phi): as |g_v| = min_k (|g_v|^2 / k sqrt(phi) + k sqrt(phi)) / 2, v is
    that of the shortest vector g_v + k g_0, and the right k is the root of |g_v(k)| = k sqrt(phi), whose two sides
    cross once. Then d = g_0 + g_v / k. Where the best g_v is 0, as if two tasks have opposite gradients, that is the
    limit for small k.

    Args:
        gram: float64 [T, T], inner products of the tasks' gradients g_i.
        weights: float64 [T], w_i.
        c: largest distance from g_0, as a share of its norm, 0 <= c < 1; with 0 d is g_0.
    """
    from scipy.optimize import brentq

    with_mean = gram @ weights
    square = float(weights @ with_mean)
    radius, largest = c * np.sqrt(max(0.0, square)), np.sqrt(gram.diagonal().max())
    if radius <= _LEAST_RATIO * c * largest:
        return weights

    def shortest(k: float) -> np.ndarray:
        return min_norm_weights(gram + k * (with_mean[:, None] + with_mean) + k * k * square)

    def excess(k: float) -> float:
        v = shortest(k)
        return float(np.sqrt(max(0.0, v @ gram @ v)) - k * radius)

    # No combination is longer than the longest gradient: the root lies at half of this at most.
    most = float(2 * largest / radius)
    least = _LEAST_RATIO * most
    k = brentq(excess, least, most, xtol=1e-15 * most, rtol=1e-15) if excess(least) > 0 else least
    return weights + shortest(k) / k


def min_norm_weights(gram: np.ndarray) -> np.ndarray:
    """Returns the convex combination of the gradients with the smallest norm, float64 [T]: MGDA's.

    O. Sener, V. Koltun, Multi-Task Learning as Multi-Objective Optimization, 2018, arXiv:1810.04650, equation 3; the
    paper's Frank-Wolfe solver approaches what an active set finds. A shorter gradient gets a larger weight, and no
    task's loss rises along the result, to first order; it is 0 where none can fall without another's rising.

    Args:
        gram: float64 [T, T], inner products of the tasks' gradients.
    """
    from scipy.optimize import nnls

    norms = np.sqrt(gram.diagonal().clip(min=0))
    if not norms.max() > 0:
        return np.full(len(gram), 1 / len(gram))
    scale = np.where(norms > 0, norms, 1.0)
    # By cosines, so that a gradient a million times shorter than another keeps its digits.
    values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
    root = np.sqrt(values.clip(min=0))[:, None] * vectors.T * (norms / norms.max())
    # min |root x|^2 + (sum x - 1)^2 over x >= 0: at x = s w, s = 1 / (1 + |root w|^2) leaves |root w|^2 / (1 + |root
    # w|^2), which is smallest where |root w| is.
    solution, _ = nnls(np.vstack([root, np.ones(len(gram))]), np.append(np.zeros(len(gram)), 1.0))
    result: np.ndarray = solution / solution.sum()
    return result
