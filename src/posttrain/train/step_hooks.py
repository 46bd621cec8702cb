"""The moments of an optimiser step at which optional methods take part in it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.loader import Batch
from posttrain.train.objectives.loss import Loss

MicroBatchPass = Callable[[float], Loss]
"""Runs both passes of a micro-batch, given the divisor of the loss's sum; returns its loss without the graph."""


class StepHook:
    """Takes part in every optimiser step; each method does nothing until it is overridden.

    The methods stand in the order of a step. The first hook of a training is the outermost.
    """

    metrics: Mapping[str, float] = {}
    """Values of the last step, which are reported with the objective's."""

    @contextmanager
    def gradients(self, batch: Batch) -> Iterator[None]:
        """Surrounds all forward and backward passes of a step, again where memory ran out."""
        yield

    def backward(self, batch: Batch, number: int, run: MicroBatchPass, divisor: float) -> Loss:
        """Runs both passes of a step's micro-batch of this number."""
        return run(divisor)

    def updated(self, step: int, scale: float) -> None:
        """Called after the optimiser has stepped; the gradients were those of the loss times ``scale``."""

    def observe(self, step: int, loss: float) -> None:
        """Called with the mean loss of each finished step, those without an update included."""

    @contextmanager
    def result(self) -> Iterator[None]:
        """Makes the model, within a ``with`` block, the one that the training would end with now."""
        yield

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state by name, without a copy, for a checkpoint."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned, from all tensors of a checkpoint."""


class LossObserver(StepHook):
    """Passes the losses of each step to the sampler, whose curriculum may depend on them.

    Args:
        sampler: sampler of the training.
    """

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def observe(self, step: int, loss: float) -> None:
        self._sampler.observe(step, loss)
