"""Angles between models: those of a whole tensor, of each of its rows, or of the whole model."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.tensor_group import TensorGroup

Scope = Literal["tensor", "model"]
RowScope = Literal["tensor", "row", "model"]


def gram_matrix(group: TensorGroup, scope: str) -> np.ndarray:
    """Returns the inner products of the models, float64 [models, models], of the tensor or of the whole model."""
    return group.whole.gram() if scope == "model" else group.gram()


def row_gram_matrices(values: Tensor) -> np.ndarray:
    """Returns the inner products of the models row by row.

    Args:
        values: float32 [models, rows, columns].

    Returns:
        float64 [rows, models, models].
    """
    models, rows, _ = values.shape
    grams = np.empty((rows, models, models))
    for first in range(models):
        for second in range(first, models):
            products = torch.linalg.vecdot(values[first], values[second]).numpy()
            grams[:, first, second] = grams[:, second, first] = products
    return grams


def vector_norms(gram: np.ndarray) -> np.ndarray:
    """Returns the models' norms, [..., models], of a Gram matrix [..., models, models]."""
    return np.asarray(np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1).clip(0)))


def cosines(gram: np.ndarray) -> np.ndarray:
    """Returns the cosines of the angles between the models, [..., models, models]; with a zero vector, 0."""
    norms = vector_norms(gram)
    products = norms[..., :, None] * norms[..., None, :]
    divided = np.divide(gram, products, out=np.zeros_like(gram), where=products > 0)
    return np.asarray(divided.clip(-1, 1))
