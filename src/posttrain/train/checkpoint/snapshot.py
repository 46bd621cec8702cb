"""Copies of tensors in host memory, made by background threads while training goes on."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from threading import Thread, get_native_id
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from posttrain.train.checkpoint.format import byte_view
from posttrain.train.checkpoint.writer import check_storable

_THREADS = min(4, os.cpu_count() or 1)

Item = TypeVar("Item")

Result = TypeVar("Result")


class Snapshots:
    """Copies of tensors in buffers that the next copy uses again, so that only the first one has to find memory."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._ready: Future[None] | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Find the memory for copies of such tensors, in a thread; the next copy waits for it."""

        def find() -> None:
            self._buffers = {name: self._buffer(name, tensor).zero_() for name, tensor in tensors.items()}

        self._ready = run_in_thread(find)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies in host memory, each its own; valid until the next call.

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
        # Threads that do not wait for one another: torch's do, and on busy cores that costs ten times the copying.
        map_in_threads(
            lambda name: np.copyto(np.asarray(byte_view(buffers[name])), byte_view(tensors[name].detach())), plain
        )
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


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors themselves where they are contiguous in host memory that no other of them uses, else copies.

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
    """Start ``work`` in a thread; the future gives what it returns or raises."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)

    Thread(target=run, name="checkpoint").start()
    return future


def lower_priority() -> None:
    """Let this thread, and those that it starts, have a core only when no other work wants it.

    On Linux; elsewhere a priority is the whole process's.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 10)


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``work`` on every item, a few at a time; results in the order of the items. The first error is raised."""
    waiting = deque(enumerate(items))

    def drain() -> list[tuple[int, Result]]:
        done = []
        while waiting:
            try:
                index, item = waiting.popleft()
            except IndexError:  # another thread was faster
                break
            done.append((index, work(item)))
        return done

    futures = [run_in_thread(drain) for _ in range(min(_THREADS, len(waiting)))]
    wait(futures)
    results = dict(pair for future in futures for pair in future.result())
    return [results[index] for index in sorted(results)]
