"""The curvature of the mean training loss, by its products with vectors; the matrix itself is never formed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from posttrain.attribution.influence.functional_model import Batch, FunctionalModel, Parameters
from posttrain.attribution.influence.gradients import directions_at_once, record_blocks


@dataclass(eq=False)
class Curvature:
    """H, the Gauss-Newton matrix [P, P]: the mean over the training records of J' L J.

    J is the Jacobian of a record's outputs in the parameters, and L the Hessian of its loss in the outputs (J. Martens,
    New Insights and Perspectives on the Natural Gradient Method, 2020, arXiv:1412.1193, section 8). For a loss that is
    convex in the outputs it has no negative eigenvalue, wherever training stopped, so that with any damping it can be
    inverted; for cross-entropy it is the Fisher information. The exact Hessian of P. W. Koh and P. Liang (2017,
    arXiv:1703.04730) has negative eigenvalues short of a minimum. If outputs are linear in the parameters, the two are
    the same.

    Args:
        model: the model and the loss.
        records: N training records.
        block_size: records at a time, as `posttrain.attribution.influence.gradients.record_blocks` takes it.

    Attributes:
        evaluations: products of one record's curvature with one vector so far.

    Raises:
        UserError: there are no records.
    """

    model: FunctionalModel
    records: Sequence[Any]
    block_size: int | None = None
    evaluations: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        record_blocks(self.model, len(self.records), self.block_size)

    def product(self, vectors: Tensor) -> Tensor:
        """Multiplies H with the columns of [P, m]; [P, m] in the vectors' dtype."""
        total = torch.zeros_like(vectors)
        directions = vectors.T.to(self.model.dtype).contiguous()
        for batch in self.batches():
            total += self._batch_product(batch, directions).T.to(total.dtype)
        # H is of the mean loss: its scale, and so the damping's meaning, must not depend on the number of records.
        self.evaluations += len(self.records) * vectors.shape[1]
        return total / len(self.records)

    def batches(self) -> Iterator[Batch]:
        """Yields the records, a block at a time."""
        for rows in record_blocks(self.model, len(self.records), self.block_size):
            yield self.model.batch(self.records[rows])

    def _batch_product(self, batch: Batch, directions: Tensor) -> Tensor:
        """Multiplies the sum of the records' curvature with each of m directions [m, P]: [m, P]."""
        multiply = self._gauss_newton(batch)

        def flat(direction: Tensor) -> Tensor:
            return self.model.flat(multiply(self.model.unflat(direction)))

        # In chunks, as each direction keeps the tangents of a whole forward pass.
        return vmap(flat, chunk_size=directions_at_once(self.model, len(batch[0])))(directions).detach()

    def _gauss_newton(self, batch: Batch) -> Callable[[Parameters], Parameters]:
        def outputs(parameters: Parameters) -> Tensor:
            return self.model.outputs_at(parameters, batch)

        def loss(values: Tensor) -> Tensor:
            return self.model.losses(values, batch).sum()

        linearised: tuple[Any, ...] = vjp(outputs, self.model.parameters)
        values, jacobian_transposed = linearised[0].detach(), linearised[1]

        def multiply(direction: Parameters) -> Parameters:
            # J' L J v from the right: forward mode, the loss's Hessian, backward mode. J is never formed.
            tangent = jvp(outputs, (self.model.parameters,), (direction,))[1]
            cotangent = jvp(grad(loss), (values,), (tangent,))[1]
            product: Parameters = jacobian_transposed(cotangent)[0]
            return product

        return multiply


def mean_eigenvalue(curvature: Curvature, seed: int = 0) -> float:
    """Estimates the mean eigenvalue of a curvature, its trace over its size, from a random vector of signs.

    M. F. Hutchinson 1990.
    """
    model = curvature.model
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (model.size, 1), generator=generator).to(model.dtype).to(model.device) * 2 - 1
    # In float64: a sum over millions of parameters loses its small terms in float32.
    trace = float((signs.double() * curvature.product(signs).double()).sum())
    return trace / model.size
