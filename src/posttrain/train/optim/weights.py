"""The interface of a training's weights: their gradient, the optimiser's step, and their state."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Weights(Protocol):
    """The trained weights of a model, and the optimiser that steps them.

    Whatever changes gradients or weights asks here: an implementation may hold parts of tensors, or copies elsewhere.
    """

    names: list[str]
    """Names of the trained weights in the model, in the order of `finished_sums`."""

    def finished_sums(self) -> list[Tensor]:
        """Returns the float32 gradients after a backward pass, which may be changed in place."""

    def gradient_norms(self) -> dict[str, float]:
        """Returns the gradient's L2 norm by layer group: ``embeddings``, ``layers.N`` and ``head``.

        The whole norm is the root of the sum of their squares.
        """

    def step(self, rate: float, scale: float = 1.0) -> float | None:
        """Steps at a learning rate with the gradients times ``scale``, and clears them.

        Returns:
            Norm of the update by that of the weights; None if that is 0.
        """

    def zero_grad(self) -> None:
        """Clears the gradients."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state by name, without a copy: float32 weights as ``master.NAME``, and the optimiser's state."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned; weights alone clear the optimiser's state.

        Raises:
            UserError: it is of another model or optimiser; nothing is changed.
        """
