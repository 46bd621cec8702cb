"""Tensors as they are at this moment, in host memory."""

from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from posttrain.train.checkpoint.tensor_bytes import raw
from posttrain.train.checkpoint.tensors_file import check_storable
from posttrain.train.checkpoint.threads import alongside, each


class Snapshots:
    """Copies of tensors in buffers that the next copy uses again, so that only the first one has to find memory."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._ready: Future[None] | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Find the memory for copies of such tensors, in a thread; the next copy waits for it."""

        def find() -> None:
            self._buffers = {name: self._buffer(name, tensor).zero_() for name, tensor in tensors.items()}

        self._ready = alongside(find)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies in host memory, each its own; valid until the next call.

        Raises:
            ValueError: a tensor is sparse, or of a dtype that the file cannot hold.
        """
        check_storable(tensors)
        if self._ready is not None:
            found, self._ready = self._ready, None
            found.result()
        buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        self._buffers = buffers
        plain = [name for name, tensor in tensors.items() if _is_plain(tensor)]
        for name in tensors.keys() - plain:
            buffers[name].copy_(tensors[name].detach(), non_blocking=tensors[name].is_cuda)
        # Threads that do not wait for one another: torch's do, and on busy cores that costs ten times the copying.
        each(lambda name: np.copyto(np.asarray(raw(buffers[name])), raw(tensors[name].detach())), plain)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # Only from pinned memory can an accelerator copy at full speed.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are the tensor: in host memory, one after another, not conjugated."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors themselves where they are contiguous in host memory that no other of them uses, else copies.

    Raises:
        ValueError: a tensor is sparse, or of a dtype that the file cannot hold.
    """
    check_storable(tensors)
    hosts: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if host.untyped_storage().data_ptr() in places:
            host = host.clone()
        places.add(host.untyped_storage().data_ptr())
        hosts[name] = host
    return hosts
