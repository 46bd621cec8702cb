"""Runs a merge plan: streams the tensors through threads of bounded memory, into files that are read back."""

import ctypes
import os
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.merge.plan import MergePlan, TensorPlan
from posttrain.merge.shard_writer import SHARD_BYTES, ShardWriter, TensorSpec
from posttrain.merge.sources import block_rows
from posttrain.merge.tensor_group import Arena, BlockFunction, Digests, TensorGroup
from posttrain.merge.whole_model import WholeModel
from posttrain.store.errors import UserError
from posttrain.store.progress import progress_bar

MEMORY = 2 << 30
"""Bytes of weights that are held at once, by default."""


@dataclass(frozen=True)
class MergeRun:
    """The measurements of one run of a plan.

    Attributes:
        seconds: of the whole run.
        peak_memory: bytes that the process held at most, until the end of the run.
        inputs: digest (XXH3, 128 bits) of each tensor that was read, by model and tensor.
        outputs: digest of each tensor that was written, and read back, by name.
        adapter: what an adapter keeps of the task vector, if the result is one.
    """

    seconds: float
    peak_memory: int
    inputs: Mapping[tuple[str, str], str]
    outputs: Mapping[str, str]
    adapter: Mapping[str, Any] | None = None


def run_plan(
    plan: MergePlan, folder: Path, memory: int = MEMORY, threads: int | None = None, shard_bytes: int = SHARD_BYTES
) -> MergeRun:
    """Writes the weights of a merged model.

    The result is the same to the last bit whatever the threads, the memory and the order in which they finish: a
    tensor is merged by one thread, in blocks whose size hangs on its shape alone, with random numbers of its name.

    Args:
        plan: the merge.
        folder: an empty folder.
        memory: bytes of weights that are held at once.
        threads: that merge tensors side by side; one a core by default.
        shard_bytes: most bytes of one file.

    Raises:
        UserError: a weight is NaN or infinite, or the disk refused.
    """
    start = time.perf_counter()
    keep_freed_memory()
    count = threads or len(os.sched_getaffinity(0))
    job = MergeJob(plan, memory // (count + 1))
    specs = [TensorSpec(tensor.name, tensor.shape, tensor.dtype, tensor.bytes) for tensor in plan.tensors]
    writer = ShardWriter(folder, specs, shard_bytes)
    outputs: dict[str, str] = {}
    try:
        with one_thread_each(), progress_bar("merging", plan.bytes >> 20, "MiB") as advance:
            pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
            try:
                # The largest first, so that no thread begins it when the others are done.
                order = sorted(plan.tensors, key=lambda tensor: -tensor.bytes)
                futures = {pool.submit(job.merge, tensor, writer): tensor for tensor in order}
                for future in as_completed(futures):
                    future.result()
                    advance(futures[future].bytes >> 20)
                checks = {pool.submit(writer.verify, tensor.name): tensor.name for tensor in order}
                writer.sync()
                outputs = {name: check.result() for check, name in checks.items()}
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        writer.close()
    return MergeRun(time.perf_counter() - start, peak_memory(), job.digests.values, dict(sorted(outputs.items())))


def estimate_seconds(plan: MergePlan, memory: int = MEMORY, threads: int | None = None) -> float:
    """Estimates a run by merging the plan's tensor of middle size, and writing it nowhere."""
    count = threads or len(os.sched_getaffinity(0))
    job = MergeJob(plan, memory // (count + 1))
    merged = [tensor for tensor in plan.tensors if tensor.method]
    if not merged:
        return 0.0
    sample = middle_tensor(merged)
    with one_thread_each():
        start = time.perf_counter()
        job.merge(sample, _Discard())
        seconds = time.perf_counter() - start
    return seconds * sum(tensor.elements for tensor in merged) / max(sample.elements, 1) / count


def middle_tensor(tensors: Sequence[TensorPlan]) -> TensorPlan:
    """Returns the tensor in which the middle one of all elements lies, ordered by size: it speaks for the most."""
    ordered = sorted(tensors, key=lambda tensor: tensor.elements)
    half, passed = sum(tensor.elements for tensor in tensors) / 2, 0
    for tensor in ordered:
        passed += tensor.elements
        if passed >= half:
            return tensor
    return ordered[-1]


class _Discard:
    """Takes a tensor's parts, and writes nothing."""

    def write(self, tensor: str, parts: Iterable[Tensor]) -> None:
        for _ in parts:
            pass


class MergeJob:
    """The state that the threads of one run share."""

    def __init__(self, plan: MergePlan, arena_bytes: int) -> None:
        self.plan, self.digests = plan, Digests()
        self._arena_bytes = arena_bytes
        self._local = threading.local()
        self._whole = {
            key: WholeModel(lambda key=key: self._groups(key), len(tensors[0].inputs), sum(t.elements for t in tensors))  # type: ignore[misc]
            for key, tensors in _by_method(plan.tensors).items()
        }

    def merge(self, tensor: TensorPlan, writer: ShardWriter | _Discard) -> None:
        """Merges one tensor and writes it."""
        if tensor.method is None:
            writer.write(tensor.name, self._copied(tensor))  # all models have the same, as the preflight has checked
            return
        group = self._group(tensor)
        function = tensor.method.function(group, **tensor.options)
        writer.write(tensor.name, self._blocks(tensor, group, function))

    def task_vector(self, tensor: TensorPlan) -> Tensor:
        """Returns the merged task vector of a tensor in its shape, float32, without the base."""
        assert tensor.method is not None
        group = self._group(tensor)
        function, merged, done = tensor.method.function(group, **tensor.options), torch.empty(tensor.elements), 0
        for block in group.blocks():
            result = function(block).reshape(-1)
            merged[done : done + len(result)] = result
            done += len(result)
        return merged.view(tensor.shape)

    def _blocks(self, tensor: TensorPlan, group: TensorGroup, function: BlockFunction) -> Iterator[Tensor]:
        rounded = self._arena().take("rounded", 1 << 16, tensor.dtype)
        for block in group.blocks():
            result = function(block)
            if block.base is not None:
                result = torch.add(result, block.base, out=result)
            if tensor.dtype != torch.float32:
                if len(rounded) < result.numel():
                    rounded = self._arena().take("rounded", result.numel(), tensor.dtype)
                result = rounded[: result.numel()].copy_(result.reshape(-1))
            if tensor.dtype == torch.float16:
                _check_range(tensor, result)
            yield result

    def _copied(self, tensor: TensorPlan) -> Iterator[Tensor]:
        entry, done = tensor.inputs[0], 0
        columns = tensor.shape[-1] if tensor.shape else 1
        step = columns * block_rows(max(columns, 1))
        part = self._arena().take("rounded", min(step, tensor.elements), tensor.dtype)
        while done < tensor.elements:
            count = min(step, tensor.elements - done)
            entry.source.read(entry.tensor, done, part[:count])
            yield part[:count]
            done += count

    def _group(self, tensor: TensorPlan, arena: Arena | None = None, digests: bool = True) -> TensorGroup:
        assert tensor.method is not None
        return TensorGroup(
            tensor.name,
            tensor.inputs,
            tensor.base,
            arena or self._arena(),
            self._whole[_key(tensor)],
            self.plan.recipe.seed,
            self.digests if digests else None,
            task_vectors=tensor.method.task_vectors,
        )

    def _groups(self, key: tuple[object, ...]) -> Iterator[TensorGroup]:
        arena = Arena(self._arena_bytes)
        for tensor in _by_method(self.plan.tensors)[key]:
            yield self._group(tensor, arena, digests=False)

    def _arena(self) -> Arena:
        if not hasattr(self._local, "arena"):
            self._local.arena = Arena(self._arena_bytes)
        arena: Arena = self._local.arena
        return arena


def _key(tensor: TensorPlan) -> tuple[object, ...]:
    name = tensor.method.name if tensor.method else None
    return name, tuple(entry.source.name for entry in tensor.inputs), tensor.base and tensor.base.source.name


def _by_method(tensors: Sequence[TensorPlan]) -> dict[tuple[object, ...], list[TensorPlan]]:
    groups: dict[tuple[object, ...], list[TensorPlan]] = {}
    for tensor in tensors:
        if tensor.method is not None:
            groups.setdefault(_key(tensor), []).append(tensor)
    return groups


def _check_range(tensor: TensorPlan, result: Tensor) -> None:
    if not torch.isfinite(result).all():
        raise UserError(f"tensor {tensor.name} has numbers beyond float16's", where="dtype", fix="write it in bfloat16")


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Has torch compute in the thread that asks: it would split each thread's block among all cores again."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Has the allocator keep what is freed for the next block."""
    # glibc gives freed memory above half a megabyte back to the system, and the page faults of the next block then cost
    # more than its arithmetic. -3 and -1 are malloc.h's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD; only glibc has the call.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-3, 4 << 20)
        mallopt(-1, 64 << 20)


def peak_memory() -> int:
    """Returns the bytes that the process has held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
