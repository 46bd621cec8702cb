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

    The Gauss-Newton matrix is taken to be block-diagonal over linear layers, and each block to have the eigenvectors of
    the Kronecker product of two second moments: of the layer's inputs, and of the gradients of its outputs. The
    eigenvalues are not theirs but the mean squares of the gradient along these eigenvectors (George et al., equation
    10). It is exact where the factorisation is: for one record and one layer, or one linear layer and squared error.

    Args:
        samples: pseudo-gradients drawn for each record, from the model's own predictions; None: the exact sum over the
            outputs, which costs a pass backwards each.
        seed: of the draws.
    """

    samples: int | None = 1
    seed: int = 0

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """As `posttrain.attribution.influence.ihvp.solver.Solver` has it; there are no residuals.

        Raises:
            UserError: a parameter is in no linear layer, the loss has no roots, or the curvature is to be the Hessian.
        """
        check_damping(damping)
        if curvature.kind != "gauss_newton":
            raise UserError("EK-FAC is of the Gauss-Newton matrix", where="influence.curvature")
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
        """The eigenvectors and corrected eigenvalues of each layer, from two passes over the records."""
        layers = _linear_layers(curvature.learner)
        if not isinstance(curvature.learner.losses, GaussNewtonLoss):
            raise UserError("EK-FAC takes a loss that has roots", where="influence.losses", fix="take CrossEntropy")
        sums: dict[str, tuple[Tensor, Tensor]] = {}
        for name, read, answered in self._passes(curvature, layers):
            # Padding, which nothing reaches, is no input.
            used = (answered != 0).any(-1).to(read.dtype).unsqueeze(-1)
            inputs, outputs = _second_moment(read * used), _second_moment(answered)
            before = sums.get(name, (torch.zeros_like(inputs), torch.zeros_like(outputs)))
            sums[name] = before[0] + inputs, before[1] + outputs
        bases = {name: (torch.linalg.eigh(a)[1], torch.linalg.eigh(b)[1]) for name, (a, b) in sums.items()}
        squares: dict[str, Tensor] = {}
        for name, read, answered in self._passes(curvature, layers):
            inputs, outputs = bases[name]
            along = (answered @ outputs).transpose(1, 2) @ (read @ inputs)  # [B, out, in]
            squares[name] = squares.get(name, 0) + along.square().sum(0)
        count, slices = len(curvature.records), curvature.learner.slices
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
        """Each layer's inputs [B, T, in] and gradients of its outputs [B, T, out], for each block and pseudo-gradient.

        Float64. A layer that has a bias reads a further 1.
        """
        learner = curvature.learner
        loss = learner.losses
        assert isinstance(loss, GaussNewtonLoss)
        generator = torch.Generator(device=learner.device).manual_seed(self.seed)
        parameters = {name: value.detach().requires_grad_() for name, value in learner.parameters.items()}
        with progress_bar("measuring the curvature", len(curvature.records), "records") as advance:
            for batch in curvature.batches():
                with _LayerHooks(layers) as taps:
                    outputs = learner.outputs_at(parameters, batch)
                reads, answers = taps.checked(batch)
                roots = loss.roots(outputs.detach(), batch, self.samples, generator)
                curvature.evaluations += len(roots) * len(batch[0])
                for root in roots:
                    found: Sequence[Any] = torch.autograd.grad(outputs, answers, root, retain_graph=True)
                    for name, read, answered in zip(layers, reads, found, strict=True):
                        biased = _parameter_name(name, "bias") in learner.parameters
                        yield name, _flatten_positions(read, biased), _flatten_positions(answered, False)
                advance(len(batch[0]))


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """One layer's part of the matrix.

    Attributes:
        inputs: eigenvectors of the inputs' second moment in columns, float64 [in, in]; the bias counts as an input.
        outputs: those of the output gradients' second moment, float64 [out, out].
        eigenvalues: float64 [out, in], of the matrix in this basis.
        weight, bias: where the layer's parameters stand in a vector.
    """

    inputs: Tensor
    outputs: Tensor
    eigenvalues: Tensor
    weight: slice
    bias: slice | None

    def gather(self, vectors: Tensor) -> Tensor:
        """The layer's part of vectors [P, m], as matrices: float64 [m, out, in]."""
        found = vectors[self.weight].T.reshape(vectors.shape[1], len(self.outputs), -1)
        if self.bias is not None:
            found = torch.cat([found, vectors[self.bias].T[:, :, None]], -1)
        return found.double()

    def scatter(self, vectors: Tensor, matrices: Tensor) -> None:
        """Write what ``gather`` reads."""
        if self.bias is not None:
            vectors[self.bias] = matrices[:, :, -1].T.to(vectors.dtype)
            matrices = matrices[:, :, :-1]
        vectors[self.weight] = matrices.flatten(1).T.to(vectors.dtype)


class _LayerHooks(ExitStack):
    """What linear layers read and give while the context lasts."""

    def __init__(self, layers: dict[str, nn.Linear]) -> None:
        super().__init__()
        self._seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}
        for name, layer in layers.items():
            self.callback(layer.register_forward_hook(self._tap(name)).remove)

    def _tap(self, name: str) -> Any:
        def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._seen[name].append((inputs[0].detach(), output))

        return keep

    def checked(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and outputs of each layer, which ran once and had a row a record."""
        for name, seen in self._seen.items():
            if len(seen) != 1 or len(seen[0][0]) != len(batch[0]):
                raise UserError(
                    f"EK-FAC takes layers that run once a batch, with a row a record: {name} does not",
                    where="influence",
                )
        return [seen[0][0] for seen in self._seen.values()], [seen[0][1] for seen in self._seen.values()]


def _linear_layers(learner: FunctionalModel) -> dict[str, nn.Linear]:
    """The linear layers that hold the parameters that count, by name."""
    found = {
        name: module
        for name, module in learner.model.named_modules()
        if isinstance(module, nn.Linear) and _parameter_name(name, "weight") in learner.parameters
    }
    covered = {_parameter_name(name, part) for name in found for part in ("weight", "bias")}
    if other := [name for name in learner.parameters if name not in covered]:
        raise UserError(
            f"EK-FAC takes the weights of linear layers, not {other[0]}", where="influence", fix="take another solver"
        )
    return found


def _parameter_name(layer: str, part: str) -> str:
    """The name of a layer's parameter; a model that is a layer itself has no name."""
    return f"{layer}.{part}" if layer else part


def _flatten_positions(states: Tensor, with_one: bool) -> Tensor:
    """[B, D] or [B, ..., D] as float64 [B, T, D], or D + 1."""
    found = states.detach().double().reshape(len(states), -1, states.shape[-1])
    return torch.cat([found, torch.ones_like(found[..., :1])], -1) if with_one else found


def _second_moment(states: Tensor) -> Tensor:
    flat = states.flatten(0, -2)
    return flat.T @ flat
