"""Statistics over all tensors of the models, for methods that look at the whole of them; each is computed once."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from posttrain.merge.order_statistics import kth_largest

if TYPE_CHECKING:
    from posttrain.merge.tensor_group import TensorGroup


class WholeModel:
    """The tensors that one method merges.

    Args:
        groups: yields the group of each tensor; called again for each pass.
        models: number of models.
        elements: of all tensors.
    """

    def __init__(self, groups: "Callable[[], Iterator[TensorGroup]]", models: int, elements: int) -> None:
        self._groups, self.models, self.elements = groups, models, elements
        self._gram: np.ndarray | None = None
        self._thresholds: dict[tuple[float, ...], list[float]] = {}

    def gram(self) -> np.ndarray:
        """Returns the inner products of the models, float64 [models, models]."""
        if self._gram is None:
            # math.fsum, as the sum must not depend on the order of the tensors.
            grams = [group.gram() for group in self._groups()]
            self._gram = np.array(
                [[math.fsum(gram[i, j] for gram in grams) for j in range(self.models)] for i in range(self.models)]
            )
        return self._gram.copy()

    def kth_largest(self, shares: Sequence[float]) -> list[float]:
        """Returns for each model the magnitude that the share of its values that are largest reaches."""
        key = tuple(shares)
        if key not in self._thresholds:
            self._thresholds[key] = kth_largest(self._magnitudes, self.models, self.elements, shares)
        return self._thresholds[key]

    def _magnitudes(self, stride: int) -> Iterator[list[np.ndarray]]:
        return chain.from_iterable(group.magnitudes(stride) for group in self._groups())
