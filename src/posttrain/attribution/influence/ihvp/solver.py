"""The interface of inverse Hessian-vector solvers, and their residuals."""

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.attribution.influence.curvature import Curvature
from posttrain.store.errors import UserError

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Solution:
    """x with (H + damping I) x = b, or near it.

    Attributes:
        x: [P, m].
        residuals: float64 [m], ``|(H + damping) x - b| / |b|`` of each column, 0 where b is 0; None of a way that
            replaces H by another matrix.
    """

    x: Tensor
    residuals: npt.NDArray[np.float64] | None


class Solver(Protocol):
    """A way to invert."""

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        """x for each of the columns of b, [P, m].

        Raises:
            UserError: the curvature cannot be inverted this way.
        """
        ...


def check_damping(damping: float) -> None:
    """Raise a UserError unless the damping is a number of 0 or more."""
    if not 0 <= damping < float("inf"):
        raise UserError(f"the damping must be 0 or more, not {damping}", where="influence.damping")


def column_norms(vectors: Tensor) -> Tensor:
    """Euclidean lengths of the columns of [P, m], summed in float64: [m]."""
    return vectors.double().square().sum(0).sqrt()


def relative_norms(residual: Tensor, b: Tensor) -> npt.NDArray[np.float64]:
    """Lengths of the columns of [P, m] in units of b's; 0 where b is 0."""
    whole = column_norms(b)
    found = torch.where(whole > 0, column_norms(residual) / whole, 0)
    return found.cpu().numpy().astype(np.float64)


def relative_residuals(curvature: Curvature, x: Tensor, b: Tensor, damping: float) -> npt.NDArray[np.float64]:
    """What is left of b, for the price of one product."""
    return relative_norms(curvature.product(x) + damping * x - b, b)


def warn_residuals(name: str, left: npt.NDArray[np.float64], tolerance: float, fix: str) -> None:
    """Log a warning if some residual is above the tolerance."""
    if (wrong := int((left > tolerance).sum())) > 0:
        log.warning(
            "%s: %d of %d test records are solved to a residual above %g, up to %.2g; %s",
            name, wrong, len(left), tolerance, left.max(), fix,
        )  # fmt: skip
