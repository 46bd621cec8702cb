"""Masters, gradient sums and the optimiser's state in the host's memory (Ren et al. 2021, ZeRO-Offload,
arXiv:2101.06840): an accelerator keeps weights and activations alone, and the CPU steps.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from posttrain.store.errors import UserError


class Offload:
    """Keeps masters, gradient sums and optimiser state of an accelerator's weights in the host's memory.

    Copies go through pinned memory, during the backward pass.

    Args:
        weights: the trained weights, of any floating-point dtype.
    """

    @classmethod
    def from_accelerator(cls, weights: Sequence[Tensor]) -> Self:
        """Offloads weights that are on an accelerator.

        Raises:
            UserError: they are on the CPU already.
        """
        if all(weight.device.type == "cpu" for weight in weights):
            raise UserError(
                "there is no accelerator whose memory it would save",
                where="train.optimizer.offload",
                fix="set it to false",
            )
        return cls(weights)

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        self.masters = [_empty_on_host(weight, torch.float32).copy_(weight.detach()) for weight in self.weights]
        self._low = [_empty_on_host(weight, weight.dtype) for weight in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        cuda = any(weight.is_cuda for weight in self.weights)
        self._stream = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        self._landing: list[tuple[int, torch.cuda.Event | None]] = []

    @torch.no_grad()
    def add(self, index: int, gradient: Tensor) -> None:
        """Adds a gradient to the sum of weight number ``index``; the gradient may be freed as soon as this returns."""
        # One gradient stays in flight: it is added when the next arrives, so that the device does not wait for the CPU.
        self._add_landed(keep=0 if any(index == waiting for waiting, _ in self._landing) else 1)
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if self._stream is None:
            self._low[index].copy_(dense)
            self._landing.append((index, None))
            return
        self._stream.wait_stream(torch.cuda.current_stream(dense.device))
        with torch.cuda.stream(self._stream):
            self._low[index].copy_(dense, non_blocking=True)
            # The allocator would otherwise give the gradient's memory away while it is being copied.
            dense.record_stream(self._stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._landing.append((index, event))

    def finish(self) -> None:
        """Waits for the gradients in flight, and adds them."""
        self._add_landed(keep=0)

    @torch.no_grad()
    def round_back(self) -> None:
        """Copies the masters into the weights, rounded to their dtype on the host."""
        for weight, master, low in zip(self.weights, self.masters, self._low, strict=True):
            weight.copy_(low.copy_(master), non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()  # before the buffers are overwritten

    def _add_landed(self, keep: int) -> None:
        while len(self._landing) > keep:
            index, event = self._landing.pop(0)
            if event is not None:
                event.synchronize()
            total = self.masters[index].grad
            assert total is not None
            total.add_(self._low[index])


def _empty_on_host(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(weight.shape, dtype=dtype, device="cpu", pin_memory=weight.is_cuda)
