"""Copies of tensors in host memory, made by background threads while training runs."""

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread, get_native_id
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from posttrain.train.checkpoint.format import byte_view
from posttrain.train.checkpoint.writer import check_storable

_THREADS = min(4, os.cpu_count() or 1)

Result = TypeVar("Result")


class Snapshots:
    """Copies tensors into host buffers that are used again, so that only the first copy allocates memory."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._ready: Future[None] | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocates buffers for such tensors in a thread; the next copy waits for it."""

        def find() -> None:
            self._buffers = {name: self._buffer(name, tensor).zero_() for name, tensor in tensors.items()}

        self._ready = run_in_thread(find)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies tensors to contiguous host memory; the copies are valid until the next call.

        Raises:
            ValueError: a tensor is sparse, or of a dtype that the file cannot hold.
        """
        check_storable(tensors)
        if self._ready is not None:
            prepared, self._ready = self._ready, None
            prepared.result()
        buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        self._buffers = buffers
        plain = [name for name, tensor in tensors.items() if _is_plain(tensor)]
        for name in tensors.keys() - plain:
            buffers[name].copy_(tensors[name].detach(), non_blocking=tensors[name].is_cuda)
        # Our own threads do not wait for one another: torch's do, and on busy cores that costs ten times the copying.
        with ThreadPoolExecutor(_THREADS, "checkpoint") as threads:
            list(threads.map(lambda name: _copy(tensors[name], buffers[name]), plain))
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # An accelerator copies at full speed only to pinned memory.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer


def _copy(tensor: Tensor, buffer: Tensor) -> None:
    np.copyto(np.asarray(byte_view(buffer)), byte_view(tensor.detach()))


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether the tensor is contiguous in host memory, and no lazy conjugate or negative."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors that are contiguous in host memory and share none as they are, and copies of the others.

    Raises:
        ValueError: a tensor is sparse, or of a dtype that the file cannot hold.
    """
    check_storable(tensors)
    hosts: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if host.untyped_storage().data_ptr() in storages:
            host = host.clone()
        storages.add(host.untyped_storage().data_ptr())
        hosts[name] = host
    return hosts


def run_in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Starts ``work`` in a thread and returns its future."""
    # No executor: it refuses work while the interpreter exits, and a thread is waited for.
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by ``future.result()``
            future.set_exception(error)

    Thread(target=run, name="checkpoint").start()
    return future


def lower_priority() -> None:
    """Lowers the priority of this thread and of those that it starts, so that training keeps its cores."""
    # Elsewhere a priority belongs to the whole process.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 10)
