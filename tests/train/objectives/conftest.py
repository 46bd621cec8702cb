"""Rows of everything that an objective may read."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

VOCABULARY, WIDTH, TEACHER_WIDTH = 7, 5, 6


def rows(seed: int, n: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> dict[str, Tensor]:
    """N rows; ``scale`` is how far log-probabilities, logits and hidden states are from 0."""
    rng = np.random.default_rng(seed)
    made: dict[str, Tensor] = {}
    for name in ("chosen", "rejected", "reference_chosen", "reference_rejected"):
        counts = rng.integers(1, 9, n)
        made[f"{name}_counts"] = torch.from_numpy(counts)
        made[name] = torch.from_numpy(-counts * rng.uniform(0.05, 3, n) * scale).to(dtype)
    made["margin"] = torch.from_numpy(rng.uniform(0, 1, n)).to(dtype)
    made["desirable"] = torch.from_numpy(rng.random(n) < 0.5)
    made["targets"] = torch.from_numpy(rng.integers(0, VOCABULARY, n))
    for name, width in (("student", VOCABULARY), ("teacher", VOCABULARY), ("hidden", WIDTH)):
        made[name] = torch.from_numpy(rng.normal(0, 2 * scale, (n, width))).to(dtype)
    made["teacher_hidden"] = torch.from_numpy(rng.normal(0, scale, (n, TEACHER_WIDTH))).to(dtype)
    return made


@pytest.fixture(scope="session")
def make() -> Callable[..., dict[str, Tensor]]:
    return rows
