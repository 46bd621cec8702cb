"""Runs a merge plan: streams the tensors through processes or accelerators, into files that are read back."""

import ctypes
import os
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.jobs.forks import forked_workers, is_worker
from posttrain.merge.plan import MergePlan, TensorPlan, number_name
from posttrain.merge.shard_writer import SHARD_BYTES, ShardWriter, TensorSpec
from posttrain.merge.sources import block_rows
from posttrain.merge.tensor_group import BlockFunction, TensorGroup
from posttrain.merge.tensor_reader import Arena, Digests
from posttrain.models.loading import is_finite
from posttrain.store.errors import UserError
from posttrain.store.progress import progress_bar

MEMORY = 2 << 30
"""Bytes of weights that are held at once, by default."""

_LEAST_BYTES = 64 << 20  # of the result that one process merges
_THREADS = 4  # an accelerator: while one's tensor is merged, those of the others are read and written
_SYNC_BYTES = 256 << 20  # that are written through to the disk at once


@dataclass(frozen=True)
class MergeRun:
    """The measurements of one run of a plan.

    Attributes:
        seconds: of the whole run.
        peak_memory: bytes that the processes held at most, until the end of the run.
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
    plan: MergePlan,
    folder: Path,
    memory: int = MEMORY,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    devices: Sequence[torch.device] | None = None,
) -> MergeRun:
    """Writes the weights of a merged model.

    The result is the same to the last bit whatever the workers, the memory and the order in which they finish: a
    tensor is merged by one of them, in blocks whose size depends only on its shape, with random numbers of its name.

    Args:
        plan: the merge.
        folder: an empty folder.
        memory: bytes of weights that are held at once.
        workers: processes that merge tensors side by side; one per core by default.
        shard_bytes: most bytes of one file.
        devices: accelerators that merge; none for the processor, and by default those that help (`accelerators`).

    Raises:
        UserError: a weight is NaN or infinite, or the disk refused.
        WorkError: a worker was killed.
    """
    start = time.perf_counter()
    keep_freed_memory()
    devices = accelerators(plan) if devices is None else devices
    cores = len(os.sched_getaffinity(0))
    # A second process costs more than it brings where there is little to merge.
    count = workers or max(1, min(cores, _THREADS * len(devices) or cores, plan.bytes // _LEAST_BYTES))
    specs = [TensorSpec(tensor.name, tensor.shape, tensor.dtype, tensor.bytes) for tensor in plan.tensors]
    writer = ShardWriter(folder, specs, shard_bytes)
    try:
        with one_thread_each(), progress_bar("merging", plan.bytes >> 20, "MiB") as advance:
            job = MergeJob(plan, memory // (count + 1), writer, devices)
            # The largest first, so that no worker begins it when the others are done.
            order = sorted(range(len(plan.tensors)), key=lambda number: -plan.tensors[number].bytes)
            with forked_workers(job, count, threads=bool(devices), prepare=partial(torch.set_num_threads, 1)) as run:
                inputs: dict[tuple[str, str], str] = {}
                outputs: dict[str, str] = {}
                unsynced = 0
                for number, (output, digests) in run(MergeJob.merge, order):
                    outputs[plan.tensors[number].name] = output
                    inputs |= digests
                    advance(plan.tensors[number].bytes >> 20)
                    unsynced += plan.tensors[number].bytes
                    if unsynced >= _SYNC_BYTES:
                        # While the others work, as at the end nothing else would be done meanwhile.
                        unsynced = 0
                        writer.sync()
                writer.sync()
                own = {process: bytes for _, (process, bytes) in run(partial(MergeJob.verify, outputs=outputs), order)}
    finally:
        writer.close()
    peak = peak_memory() + sum(bytes for process, bytes in own.items() if process != os.getpid())
    return MergeRun(time.perf_counter() - start, peak, inputs, dict(sorted(outputs.items())))


def accelerators(plan: MergePlan) -> list[torch.device]:
    """Returns the GPUs that merge a plan: all that there are, where it solves linear equations for each layer.

    Other merges wait for files and memory, and a GPU only has to be started for them: a linear merge of 1.1 billion
    weights takes longer by an H100 than by four cores (BENCHMARKS.md).
    """
    methods = [tensor.method for tensor in plan.tensors if tensor.method is not None]
    solves = any(method.statistic == "gram" for method in methods)
    if not solves or not all(method.accelerated for method in methods) or not torch.cuda.is_available():
        return []
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def estimate_seconds(plan: MergePlan, memory: int = MEMORY, workers: int | None = None) -> float:
    """Estimates a run by merging the plan's tensor of middle size, and writing it nowhere."""
    count = workers or len(os.sched_getaffinity(0))
    job = MergeJob(plan, memory // (count + 1))
    merged = [tensor for tensor in plan.tensors if tensor.method]
    if not merged:
        return 0.0
    sample = middle_tensor(merged)
    with one_thread_each():
        start = time.perf_counter()
        job.merge(plan.tensors.index(sample))
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

    def write(self, tensor: str, parts: Iterable[Tensor]) -> str:
        for _ in parts:
            pass
        return ""


class MergeJob:
    """The work of one run; each process has a copy, and each of its threads memory of its own.

    Args:
        plan: the merge.
        arena_bytes: bytes of stored weights that one thread holds at most.
        writer: takes the merged tensors; None to write nothing.
        devices: accelerators, which its threads take in turn; none for the processor.
    """

    def __init__(
        self,
        plan: MergePlan,
        arena_bytes: int,
        writer: ShardWriter | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.plan, self.devices = plan, tuple(devices)
        self._next_device = cycle(self.devices)
        self.writer = writer or _Discard()
        self._arena_bytes = arena_bytes
        self._local = threading.local()

    def merge(self, number: int) -> tuple[str, dict[tuple[str, str], str]]:
        """Merges one tensor and writes it; returns its digest, and those of its inputs by source and tensor."""
        tensor, digests = self.plan.tensors[number], Digests()
        if tensor.method is None:
            # All models have the same, as the preflight has checked.
            return self.writer.write(tensor.name, self._copied(tensor)), digests.values
        group = self._group(tensor, digests)
        function = tensor.method.function(group, **tensor.options)
        return self.writer.write(tensor.name, self._blocks(tensor, group, function)), digests.values

    def verify(self, number: int, outputs: Mapping[str, str]) -> tuple[int, int]:
        """Compares a written tensor with its digest; returns the process and, in a worker, the bytes it alone holds.

        Raises:
            WorkError: it reads otherwise.
        """
        assert isinstance(self.writer, ShardWriter)
        name = self.plan.tensors[number].name
        self.writer.verify(name, outputs[name])
        # The system walks through all pages of the process to count them.
        return os.getpid(), self._own_bytes if is_worker() else 0

    @cached_property
    def _own_bytes(self) -> int:
        # Behind the merging: the memory of a process is used again for each tensor, and given back at its end.
        return _private_bytes()

    def task_vector(self, tensor: TensorPlan, digests: Digests | None = None) -> Tensor:
        """Returns the merged task vector of a tensor in its shape, float32, without the base."""
        assert tensor.method is not None
        group = self._group(tensor, digests)
        function, merged, done = tensor.method.function(group, **tensor.options), torch.empty(tensor.elements), 0
        for block in group.blocks():
            result = function(block).reshape(-1)
            if not is_finite(result):
                what = f"the change of tensor {tensor.name} has numbers beyond float32's"
                raise UserError(what, where="the result", fix="choose smaller weights, or check the models' numbers")
            merged[done : done + len(result)] = result
            done += len(result)
        return merged.view(tensor.shape)

    def _blocks(self, tensor: TensorPlan, group: TensorGroup, function: BlockFunction) -> Iterator[Tensor]:
        rounded = self._arena.take_host("rounded", 1 << 16, tensor.dtype)
        for block in group.blocks():
            result = function(block)
            if block.base is not None:
                result = torch.add(result, block.base, out=result)
            if tensor.dtype != torch.float32 or group.device is not None:
                if len(rounded) < result.numel():
                    rounded = self._arena.take_host("rounded", result.numel(), tensor.dtype)
                result = rounded[: result.numel()].copy_(result.reshape(-1))
            _check_range(tensor, result)
            yield result

    def _copied(self, tensor: TensorPlan) -> Iterator[Tensor]:
        entry, done = tensor.inputs[0], 0
        columns = tensor.shape[-1] if tensor.shape else 1
        step = columns * block_rows(max(columns, 1))
        part = self._arena.take_host("rounded", min(step, tensor.elements), tensor.dtype)
        while done < tensor.elements:
            count = min(step, tensor.elements - done)
            entry.source.read(entry.tensor, done, part[:count])
            _check_range(tensor, part[:count])
            yield part[:count]
            done += count

    def _group(self, tensor: TensorPlan, digests: Digests | None = None) -> TensorGroup:
        assert tensor.method is not None
        statistic = tensor.method.statistic
        return TensorGroup(
            tensor.name,
            tensor.inputs,
            tensor.base,
            self._arena,
            self.plan.recipe.seed,
            digests,
            task_vectors=tensor.method.task_vectors,
            fisher=tensor.statistics if statistic == "fisher" else (),
            fisher_norms=tensor.norms,
            grams=tensor.statistics if statistic == "gram" else (),
        )

    @property
    def _arena(self) -> Arena:
        if not hasattr(self._local, "arena"):
            self._local.arena = self._new_arena()
        arena: Arena = self._local.arena
        return arena

    def _new_arena(self) -> Arena:
        device = next(self._next_device, None)
        if device is None or device.type != "cuda":
            return Arena(self._arena_bytes, device)
        # Half of what is free holds stored weights; the other half blocks and what methods compute of them.
        return Arena(torch.cuda.mem_get_info(device)[0] // (2 * (_THREADS + 1)), device)


def _check_range(tensor: TensorPlan, result: Tensor) -> None:
    if not is_finite(result):
        half = tensor.dtype == torch.float16
        fix = "write it in bfloat16" if half else "choose smaller weights, or check the models' numbers"
        what = f"tensor {tensor.name} has numbers beyond {number_name(tensor.dtype)}'s"
        raise UserError(what, where="dtype" if half else "the result", fix=fix)


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


def _private_bytes() -> int:
    """Returns the bytes of memory that this process shares with no other; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
