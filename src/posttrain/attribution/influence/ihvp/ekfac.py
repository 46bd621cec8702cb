"""Inverse Hessian-vector products by EK-FAC: Kronecker factors with corrected eigenvalues."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.functional_model import Batch, FunctionalModel
from posttrain.attribution.influence.ihvp.solver import Solution, check_damping
from posttrain.attribution.influence.losses import GaussNewtonLoss
from posttrain.store.errors import UserError
from posttrain.store.progress import progress_bar


@dataclass(frozen=True)
class Ekfac:
    """EK-FAC (T. George et al. 2018, arXiv:1806.03884; for influence: R. Grosse et al. 2023, arXiv:2308.03296).

    The Gauss-Newton matrix is assumed block-diagonal over linear layers, and each block to have the eigenvectors of the
    Kronecker product of two second moments: of the layer's inputs, and of the gradients of its outputs. The eigenvalues
    are the mean squares of the gradient along these eigenvectors (George et al., equation 10). It is exact where the
    factorisation is: for one record and one layer, or one linear layer and squared error.

    Args:
        samples: pseudo-gradients drawn for each record from the model's own predictions; None for the exact sum over
            the outputs, which costs a backward pass each.
        seed: seed of the draws.
    """

    samples: int | None = 1
    seed: int = 0

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """Solves as `posttrain.attribution.influence.ihvp.solver.Solver` specifies, without residuals.

        Raises:
            UserError: a parameter is in no linear layer, or the loss has no roots.
        """
        check_damping(damping)
        x = torch.zeros_like(b)
        for block in self.fit(curvature):
            least = float(block.eigenvalues.min()) + damping
            if least <= 0:
                raise UserError("the curvature is singular", where="influence.damping", fix="raise it")
            rotated = block.inputs.T @ (block.gather(b).transpose(1, 2) @ block.outputs)  # [m, in, out]
            divided = rotated / (block.eigenvalues.T + damping)
            block.scatter(x, (block.inputs @ divided @ block.outputs.T).transpose(1, 2))
        return Solution(x, None)

    def fit(self, curvature: Curvature) -> "list[KroneckerBlock]":
        """Computes the eigenvectors and corrected eigenvalues of each layer, in two passes over the records."""
        layers = _linear_layers(curvature.model)
        if not isinstance(curvature.model.losses, GaussNewtonLoss):
            raise UserError("EK-FAC takes a loss that has roots", where="influence.losses", fix="take CrossEntropy")
        sums: dict[str, tuple[Tensor, Tensor]] = {}
        for name, activations, gradients in self._passes(curvature, layers):
            # Padding has no gradient, but activations, which are not to count.
            used = (gradients != 0).any(-1).to(activations.dtype).unsqueeze(-1)
            inputs, outputs = _second_moment(activations * used), _second_moment(gradients)
            before = sums.get(name, (torch.zeros_like(inputs), torch.zeros_like(outputs)))
            sums[name] = before[0] + inputs, before[1] + outputs
        # Only the eigenvectors: the moments' own eigenvalues are those of K-FAC, which fit worse (George et al.).
        bases = {name: (torch.linalg.eigh(a)[1], torch.linalg.eigh(b)[1]) for name, (a, b) in sums.items()}
        squares: dict[str, Tensor] = {}
        for name, activations, gradients in self._passes(curvature, layers):
            inputs, outputs = bases[name]
            # Summed over positions before it is squared: the gradient of a weight is that sum (George et al., eq. 10).
            along = (gradients @ outputs).transpose(1, 2) @ (activations @ inputs)  # [B, out, in]
            squares[name] = squares.get(name, 0) + along.square().sum(0)
        count, slices = len(curvature.records), curvature.model.slices
        return [
            KroneckerBlock(
                *bases[name],
                squares[name] / count,
                slices[_parameter_name(name, "weight")],
                slices.get(_parameter_name(name, "bias")),
            )
            for name in layers
        ]

    def _passes(self, curvature: Curvature, layers: dict[str, nn.Linear]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields each layer's inputs [B, T, in] and output gradients [B, T, out], by block and pseudo-gradient.

        Float64. A layer with a bias has a constant 1 as a further input.
        """
        model = curvature.model
        loss = model.losses
        assert isinstance(loss, GaussNewtonLoss)
        # Seeded anew for each pass, so that both passes draw the same pseudo-gradients.
        generator = torch.Generator(device=model.device).manual_seed(self.seed)
        parameters = {name: value.detach().requires_grad_() for name, value in model.parameters.items()}
        with progress_bar("measuring the curvature", len(curvature.records), "records") as advance:
            for batch in curvature.batches():
                with _LayerHooks(layers) as hooks:
                    outputs = model.outputs_at(parameters, batch)
                layer_inputs, layer_outputs = hooks.checked(batch)
                roots = loss.roots(outputs.detach(), batch, self.samples, generator)
                curvature.evaluations += len(roots) * len(batch[0])
                # The graph is kept for the next root: a forward pass for each would double the work.
                for root in roots:
                    gradients: Sequence[Any] = torch.autograd.grad(outputs, layer_outputs, root, retain_graph=True)
                    for name, activations, gradient in zip(layers, layer_inputs, gradients, strict=True):
                        biased = _parameter_name(name, "bias") in model.parameters
                        yield name, _flatten_positions(activations, biased), _flatten_positions(gradient, False)
                advance(len(batch[0]))


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """One layer's block of the matrix, in its eigenbasis.

    Attributes:
        inputs: eigenvectors of the inputs' second moment in columns, float64 [in, in]; the bias counts as an input.
        outputs: those of the output gradients' second moment, float64 [out, out].
        eigenvalues: float64 [out, in], of the matrix in this basis.
        weight, bias: the slices of the layer's parameters in a vector.
    """

    inputs: Tensor
    outputs: Tensor
    eigenvalues: Tensor
    weight: slice
    bias: slice | None

    def gather(self, vectors: Tensor) -> Tensor:
        """Reads the layer's part of vectors [P, m] as matrices: float64 [m, out, in]."""
        matrices = vectors[self.weight].T.reshape(vectors.shape[1], len(self.outputs), -1)
        if self.bias is not None:
            matrices = torch.cat([matrices, vectors[self.bias].T[:, :, None]], -1)
        return matrices.double()

    def scatter(self, vectors: Tensor, matrices: Tensor) -> None:
        """Writes the layer's part of vectors, as `gather` reads it."""
        if self.bias is not None:
            vectors[self.bias] = matrices[:, :, -1].T.to(vectors.dtype)
            matrices = matrices[:, :, :-1]
        vectors[self.weight] = matrices.flatten(1).T.to(vectors.dtype)


class _LayerHooks(ExitStack):
    """Records the inputs and outputs of linear layers while the context lasts."""

    def __init__(self, layers: dict[str, nn.Linear]) -> None:
        super().__init__()
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}
        for name, layer in layers.items():
            self.callback(layer.register_forward_hook(self._hook(name)).remove)

    def _hook(self, name: str) -> Any:
        def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._calls[name].append((inputs[0].detach(), output))

        return record

    def checked(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the inputs and outputs of each layer, which must run once, with a row for each record."""
        for name, calls in self._calls.items():
            if len(calls) != 1 or len(calls[0][0]) != len(batch[0]):
                raise UserError(
                    f"EK-FAC takes layers that run once a batch, with a row a record: {name} does not",
                    where="influence",
                )
        calls_once = [calls[0] for calls in self._calls.values()]
        return [inputs for inputs, _ in calls_once], [output for _, output in calls_once]


def _linear_layers(model: FunctionalModel) -> dict[str, nn.Linear]:
    """Returns the linear layers that hold the trainable parameters, by name."""
    layers = {
        name: module
        for name, module in model.module.named_modules()
        if isinstance(module, nn.Linear) and _parameter_name(name, "weight") in model.parameters
    }
    covered = {_parameter_name(name, part) for name in layers for part in ("weight", "bias")}
    # A parameter elsewhere has no Kronecker factors, and leaving it out would be silent.
    if other := [name for name in model.parameters if name not in covered]:
        raise UserError(
            f"EK-FAC takes the weights of linear layers, not {other[0]}", where="influence", fix="take another solver"
        )
    return layers


def _parameter_name(layer: str, part: str) -> str:
    """Returns the name of a layer's parameter; a model that is a layer itself has no prefix."""
    return f"{layer}.{part}" if layer else part


def _flatten_positions(states: Tensor, with_one: bool) -> Tensor:
    """Reshapes [B, D] or [B, ..., D] to float64 [B, T, D], or D + 1 with a constant 1."""
    flat = states.detach().double().reshape(len(states), -1, states.shape[-1])
    return torch.cat([flat, torch.ones_like(flat[..., :1])], -1) if with_one else flat


def _second_moment(states: Tensor) -> Tensor:
    flat = states.flatten(0, -2)
    return flat.T @ flat
