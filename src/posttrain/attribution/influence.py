"""Influence functions by EK-FAC: the change of a test record's loss when a training record is left out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.attribution.blocks import Arrays, Floats, cached_arrays
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder
from posttrain.store.progress import progress_bar

Batch = tuple[Tensor, ...]
"""Records side by side: tensors whose first dimension is the record."""

_DAMPING = 0.1  # of the mean eigenvalue, as R. Grosse et al. 2023 (arXiv:2308.03296, section 2.1)
_BLOCK_WORK = 2**30  # weights times records of a block, as the memory of a pass grows with both
_BLOCK_RECORDS = 8, 1024  # bounds: fewer waste the processor, more gain nothing


class Loss(Protocol):
    """A loss that is convex in the outputs, so that its Hessian in them has a square root."""

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the loss [B] of each record."""
        ...

    def roots(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        """Returns vectors [R, B, ...] whose outer products add up to the Hessian of each record's loss, on average.

        Args:
            outputs: [B, ...].
            batch: the records.
            generator: makes random draws.
        """
        ...


@dataclass(frozen=True, eq=False)
class InfluenceModel:
    """A network in evaluation mode whose trainable parameters are weights and biases of linear layers.

    Args:
        module: the network.
        outputs: its outputs [B, ...] for a batch of B records; it may not mix records.
        loss: the summed loss of each record.
        collate: makes a batch of records.
    """

    module: nn.Module
    outputs: Callable[[Batch], Tensor]
    loss: Loss
    collate: Callable[[Sequence[Any]], Batch]

    @cached_property
    def layers(self) -> dict[str, nn.Linear]:
        """The linear layers with trainable parameters, by name.

        Raises:
            UserError: no parameter is trainable, or one is not of a linear layer.
        """
        modules = self.module.named_modules()
        layers = {
            name: module for name, module in modules if isinstance(module, nn.Linear) and module.weight.requires_grad
        }
        covered = {id(value) for layer in layers.values() for value in layer.parameters()}
        # A parameter elsewhere has no Kronecker factors, and leaving it out would be silent.
        for name, value in self.module.named_parameters():
            if value.requires_grad and id(value) not in covered:
                raise UserError(f"influence is computed for the weights of linear layers, not {name}")
        if not layers:
            raise UserError("no parameter of the model requires a gradient", fix="put an adapter on")
        return layers

    def blocks(self, records: Sequence[Any], description: str) -> Iterator[tuple[slice, Batch]]:
        """Yields the rows of a block of records, and its batch."""
        fewest, most = _BLOCK_RECORDS
        weights = sum(value.numel() for value in self.module.parameters())
        size = max(fewest, min(most, _BLOCK_WORK // weights))
        device = next(self.module.parameters()).device
        with progress_bar(description, len(records), "records") as advance:
            for start in range(0, len(records), size):
                rows = slice(start, min(start + size, len(records)))
                yield rows, tuple(tensor.to(device) for tensor in self.collate(records[rows]))
                advance(rows.stop - rows.start)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns the outputs [B, ...], each layer's inputs float64 [B, T, in], and its outputs.

        A layer whose bias is trained has a constant 1 as a further input.
        """
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self.layers}

        def record(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            calls[name].append((inputs[0].detach(), output))

        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                hooks.callback(layer.register_forward_hook(partial(record, name)).remove)
            outputs = self.outputs(batch)
        for name, layer_calls in calls.items():
            if len(layer_calls) != 1 or len(layer_calls[0][0]) != len(batch[0]):
                raise UserError(f"EK-FAC takes layers that run once a batch, with a row per record: {name} does not")
        biased = [layer.bias is not None and layer.bias.requires_grad for layer in self.layers.values()]
        inputs = [_positions(calls[name][0][0], with_one) for name, with_one in zip(self.layers, biased, strict=True)]
        return outputs, inputs, [calls[name][0][1] for name in self.layers]

    def gradients(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        """Yields each layer's gradients of the records' losses, float64 [B, out, in]."""
        outputs, inputs, layer_outputs = self.forward(batch)
        gradients = torch.autograd.grad(self.loss(outputs, batch).sum(), layer_outputs)
        for name, states, gradient in zip(self.layers, inputs, gradients, strict=True):
            yield name, _positions(gradient).transpose(1, 2) @ states


def influence_functions(
    model: InfluenceModel,
    train: Sequence[Any],
    test: Sequence[Any],
    *,
    damping: float | None = None,
    folder: Path | None = None,
) -> Floats:
    """Computes influence functions (P. W. Koh and P. Liang 2017, arXiv:1703.04730, equation 2).

    The score of training record i for test record j is g_j' (H + damping I)^-1 g_i / N: to first order, by how much the
    test record's loss rises when the training record is left out, so that a helpful record has a positive score. H is
    the Gauss-Newton matrix of the mean training loss, by EK-FAC. The exact Hessian of a network has negative
    eigenvalues short of a minimum.

    Args:
        model: the trained model and the loss.
        train: N training records.
        test: M test records.
        damping: the coefficient of the L2 penalty (half the squared norm) that training added to the mean loss, or a
            stand-in for training that stopped before the minimum; a tenth of the mean eigenvalue if None.
        folder: caches finished work on these arguments alone, so that a killed run resumes; None caches nothing.

    Returns:
        [N, M], in the unit of the loss.

    Raises:
        UserError: EK-FAC does not take the model, or a gradient is not finite.
    """
    if folder is not None:
        make_folder(folder)

    def cached(name: str, compute: Callable[[], Arrays]) -> Arrays:
        return cached_arrays(None if folder is None else folder / f"{name}.block", compute)

    def solve() -> Arrays:
        layers = fit_ekfac(model, train)
        gradients: dict[str, list[Tensor]] = {name: [] for name in model.layers}
        for _, batch in model.blocks(test, "taking gradients"):
            for name, gradient in model.gradients(batch):
                gradients[name].append(gradient)
        added = _default_damping(list(layers.values())) if damping is None else damping
        return {name: layer.solve(torch.cat(gradients[name]), added).cpu().numpy() for name, layer in layers.items()}

    solutions = cached("solutions", solve)
    scores = np.empty((len(train), len(test)))
    for rows, batch in model.blocks(train, "taking gradients"):

        def products(batch: Batch = batch) -> Arrays:
            total = np.zeros((len(batch[0]), len(test)))
            for name, gradient in model.gradients(batch):
                total += gradient.flatten(1).cpu().numpy() @ solutions[name].reshape(len(test), -1).T
            return {"scores": total}

        scores[rows] = cached(f"{rows.start:08d}-{rows.stop:08d}", products)["scores"]
    if not np.isfinite(scores).all():
        raise UserError("a gradient is not finite", fix="look for NaN in the model's weights")
    return scores / len(train)


@dataclass(frozen=True, eq=False)
class EkfacLayer:
    """One layer's block of the Gauss-Newton matrix, in the eigenbasis of its Kronecker factors, float64.

    Attributes:
        inputs: eigenvectors of the inputs' second moment in columns, [in, in]; the bias counts as an input.
        outputs: those of the output gradients' second moment, [out, out].
        eigenvalues: [out, in], of the block in this basis.
    """

    inputs: Tensor
    outputs: Tensor
    eigenvalues: Tensor

    def solve(self, gradients: Tensor, damping: float) -> Tensor:
        """Multiplies the inverse of the damped block with each of [M, out, in]."""
        rotated = self.outputs.T @ gradients @ self.inputs
        return self.outputs @ (rotated / (self.eigenvalues + damping)) @ self.inputs.T


def fit_ekfac(model: InfluenceModel, records: Sequence[Any], seed: int = 0) -> dict[str, EkfacLayer]:
    """Computes EK-FAC's eigenvectors and corrected eigenvalues of each layer, in two passes over the records.

    T. George et al. 2018, arXiv:1806.03884; for influence: R. Grosse et al. 2023, arXiv:2308.03296. The matrix is
    assumed block-diagonal over linear layers, and each block to have the eigenvectors of the Kronecker product of two
    second moments: of the layer's inputs, and of the gradients of its outputs. The eigenvalues are the mean squares of
    the gradient along these eigenvectors (George et al., equation 10). It is exact where the factorisation is: for one
    record and one layer, or one linear layer and squared error.
    """
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for name, states, gradients in _pseudo_gradients(model, records, seed):
        # Padding has no gradient, but inputs, which must not count.
        used = (gradients != 0).any(-1).to(states.dtype).unsqueeze(-1)
        inputs, outputs = _second_moment(states * used), _second_moment(gradients)
        before = sums.get(name, (torch.zeros_like(inputs), torch.zeros_like(outputs)))
        sums[name] = before[0] + inputs, before[1] + outputs
    # Only the eigenvectors: the moments' own eigenvalues are those of K-FAC, which fit worse (George et al.).
    bases = {name: (torch.linalg.eigh(a)[1], torch.linalg.eigh(b)[1]) for name, (a, b) in sums.items()}
    squares: dict[str, Tensor] = {}
    for name, states, gradients in _pseudo_gradients(model, records, seed):
        inputs, outputs = bases[name]
        # Summed over positions before it is squared: the gradient of a weight is that sum (George et al., eq. 10).
        along = (gradients @ outputs).transpose(1, 2) @ (states @ inputs)  # [B, out, in]
        squares[name] = squares.get(name, 0) + along.square().sum(0)
    return {name: EkfacLayer(*bases[name], squares[name] / len(records)) for name in model.layers}


def _pseudo_gradients(model: InfluenceModel, records: Sequence[Any], seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields each layer's inputs [B, T, in] and output gradients [B, T, out], by block and root of the loss."""
    generator = torch.Generator(device=next(model.module.parameters()).device).manual_seed(seed)
    for _, batch in model.blocks(records, "measuring the curvature"):
        outputs, inputs, layer_outputs = model.forward(batch)
        # The graph is kept for the next root: a forward pass for each would double the work.
        for root in model.loss.roots(outputs.detach(), batch, generator):
            gradients: Sequence[Tensor] = torch.autograd.grad(outputs, layer_outputs, root, retain_graph=True)
            for name, states, gradient in zip(model.layers, inputs, gradients, strict=True):
                yield name, states, _positions(gradient)


def _default_damping(layers: Sequence[EkfacLayer]) -> float:
    total = sum(float(layer.eigenvalues.sum()) for layer in layers)
    mean = total / sum(layer.eigenvalues.numel() for layer in layers)
    # A model that is sure of everything has next to no curvature; without any damping the inverse would divide by it.
    return max(_DAMPING * mean, float(np.finfo(np.float32).tiny))


def _positions(states: Tensor, with_one: bool = False) -> Tensor:
    """Reshapes [B, D] or [B, ..., D] to float64 [B, T, D], or D + 1 with a constant 1."""
    flat = states.detach().double().reshape(len(states), -1, states.shape[-1])
    return torch.cat([flat, torch.ones_like(flat[..., :1])], -1) if with_one else flat


def _second_moment(states: Tensor) -> Tensor:
    flat = states.flatten(0, -2)
    return flat.T @ flat
