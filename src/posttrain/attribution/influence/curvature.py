"""The curvature of the mean training loss: matrix-vector products, and the dense matrix of small models."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from posttrain.attribution.influence.functional_model import Batch, FunctionalModel, Parameters
from posttrain.attribution.influence.gradients import directions_at_once, record_blocks
from posttrain.store.errors import UserError

CurvatureKind = Literal["gauss_newton", "hessian"]

DENSE_LIMIT = 8192
_JACOBIAN_NUMBERS = 2**25


@dataclass(eq=False)
class Curvature:
    """H, the mean over the training records of the curvature of a record's loss in the parameters: a matrix [P, P].

    ``gauss_newton``, the default, is the mean of J' L J, with the Jacobian J of a record's outputs and the Hessian L of
    its loss in them (J. Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, arXiv:1412.1193,
    section 8). For a loss that is convex in the outputs it has no negative eigenvalue, wherever training stopped, so
    that with any damping it can be inverted; for cross-entropy it is the Fisher information. ``hessian`` is the matrix
    of P. W. Koh and P. Liang (2017, arXiv:1703.04730); short of a minimum it has negative eigenvalues, and then neither
    conjugate gradient nor LiSSA takes it. Where outputs are linear in the parameters the two are the same.

    Args:
        learner: the model and the loss.
        records: N training records.
        kind: which matrix.
        block: records at a time, as `posttrain.attribution.influence.gradients.record_blocks` takes it.

    Attributes:
        evaluations: products of one record's curvature with one vector that were computed so far.

    Raises:
        UserError: there are no records.
    """

    learner: FunctionalModel
    records: Sequence[Any]
    kind: CurvatureKind = "gauss_newton"
    block: int | None = None
    evaluations: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        record_blocks(self.learner, len(self.records), self.block)
        if self.kind not in ("gauss_newton", "hessian"):
            raise UserError(f"unknown curvature `{self.kind}`", where="influence", fix="gauss_newton or hessian")

    def product(self, vectors: Tensor, rows: np.ndarray | None = None) -> Tensor:
        """H V.

        Args:
            vectors: V, [P, m].
            rows: int [n], the records over which the mean is taken; all when None.

        Returns:
            [P, m] in the vectors' dtype.
        """
        total = torch.zeros_like(vectors)
        count = len(self.records) if rows is None else len(rows)
        directions = vectors.T.to(self.learner.dtype).contiguous()
        for batch in self.batches(rows):
            total += self._of_batch(batch, directions).T.to(total.dtype)
        self.evaluations += count * vectors.shape[1]
        return total / count

    def dense(self) -> Tensor:
        """H as a whole, float64 [P, P]; symmetric to the last bit.

        Raises:
            UserError: it has more than `DENSE_LIMIT` rows.
        """
        size = self.learner.size
        if size > DENSE_LIMIT:
            raise UserError(
                f"the exact inverse takes at most {DENSE_LIMIT} parameters, the model has {size}",
                where="influence",
                fix="use another solver",
            )
        if self.kind == "hessian":
            whole = self.product(torch.eye(size, dtype=torch.float64, device=self.learner.device))
        else:
            whole = self._dense_gauss_newton()
        return (whole + whole.T) / 2

    def batches(self, rows: np.ndarray | None = None) -> Iterator[Batch]:
        """The records, or some of them, a block at a time."""
        count = len(self.records) if rows is None else len(rows)
        for part in record_blocks(self.learner, count, self.block):
            if rows is None:
                yield self.learner.batch(self.records[part])
            else:
                yield self.learner.batch([self.records[int(row)] for row in rows[part]])

    def _by_outputs(self) -> Iterator[Batch]:
        """Batches whose Jacobians, a row an output, are 2^25 numbers at most, or one record's."""
        for batch in self.batches():
            one = self.learner.outputs_at(self.learner.parameters, tuple(part[:1] for part in batch))
            step = max(1, _JACOBIAN_NUMBERS // (one.numel() * self.learner.size))
            for start in range(0, len(batch[0]), step):
                yield tuple(part[start : start + step] for part in batch)

    def _of_batch(self, batch: Batch, directions: Tensor) -> Tensor:
        """The sum of the records' curvature times each of m directions [m, P]: [m, P]."""
        make = self._gauss_newton if self.kind == "gauss_newton" else self._hessian
        times = make(batch)

        def flat(direction: Tensor) -> Tensor:
            return self.learner.flat(times(self.learner.unflat(direction)))

        # Each direction keeps the tangents of a whole forward pass.
        together = directions_at_once(self.learner, len(batch[0]))
        return vmap(flat, chunk_size=together)(directions).detach()

    def _gauss_newton(self, batch: Batch) -> Callable[[Parameters], Parameters]:
        def outputs(parameters: Parameters) -> Tensor:
            return self.learner.outputs_at(parameters, batch)

        def loss(found: Tensor) -> Tensor:
            return self.learner.losses(found, batch).sum()

        whole: tuple[Any, ...] = vjp(outputs, self.learner.parameters)
        found, pull_back = whole[0].detach(), whole[1]

        def times(direction: Parameters) -> Parameters:
            pushed = jvp(outputs, (self.learner.parameters,), (direction,))[1]
            bent = jvp(grad(loss), (found,), (pushed,))[1]
            product: Parameters = pull_back(bent)[0]
            return product

        return times

    def _hessian(self, batch: Batch) -> Callable[[Parameters], Parameters]:
        def loss(parameters: Parameters) -> Tensor:
            return self.learner.losses_at(parameters, batch).sum()

        def times(direction: Parameters) -> Parameters:
            product: Parameters = jvp(grad(loss), (self.learner.parameters,), (direction,))[1]
            return product

        return times

    def _dense_gauss_newton(self) -> Tensor:
        """From the records' Jacobians, which cost a pass backwards for each output, not for each parameter."""
        size = self.learner.size
        whole = torch.zeros(size, size, dtype=torch.float64, device=self.learner.device)

        def outputs(parameters: Parameters, record: Batch) -> Tensor:
            return self.learner.outputs_at(parameters, tuple(part[None] for part in record))[0].flatten()

        def bent(record: Batch) -> Tensor:
            alone = tuple(part[None] for part in record)
            found = self.learner.outputs_at(self.learner.parameters, alone).detach()

            def loss(flat: Tensor) -> Tensor:
                return self.learner.losses(flat.view(found.shape), alone)[0]

            return hessian(loss)(found.flatten())  # type: ignore[no-any-return]

        for batch in self._by_outputs():
            jacobians = vmap(jacrev(outputs), in_dims=(None, 0))(self.learner.parameters, batch)
            rows = self.learner.flat(jacobians, leading=2).detach().double()  # [B, K, P]
            curved = vmap(bent)(batch).detach().double()  # [B, K, K]
            whole += rows.flatten(0, 1).T @ (curved @ rows).flatten(0, 1)
        self.evaluations += len(self.records) * size
        return whole / len(self.records)
