"""Runs a plan whose result is a LoRA adapter: the merged task vector, matrix by matrix, in peft's layout."""

import json
import logging
import math
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from posttrain.merge.adapter_layout import AdapterLayout
from posttrain.merge.engine import (
    MEMORY,
    MergeJob,
    MergeRun,
    keep_freed_memory,
    middle_tensor,
    one_thread_each,
    peak_memory,
)
from posttrain.merge.lora_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdaptedModel
from posttrain.merge.low_rank import LowRank, concatenate, truncated_svd
from posttrain.merge.plan import DTYPES, MergePlan, TensorPlan, number_name
from posttrain.merge.sources import is_embedding
from posttrain.merge.tensor_reader import Digests
from posttrain.models.loading import is_finite
from posttrain.store.errors import UserError, WorkError, shorten
from posttrain.store.files import disk_errors, write_atomically
from posttrain.store.progress import progress_bar

log = logging.getLogger("posttrain")

_ROUNDING = 1e-4  # of an energy, by factors of low precision

# Of a tensor in float32, that a thread holds while it is decomposed, or saved whole.
_COPIES, _COPIES_WHOLE = 8, 3

CONCATENATE = "concatenate_lora"


@dataclass
class _Content:
    """The adapter as it grows.

    Attributes:
        matrices: B A, by module.
        whole: changed tensors that are saved as a whole, by the base's names.
        dropped: squared norm of the change of those that are left out.
        unchanged: number of tensors without a change.
        below: modules whose rank was too low for the energy.
    """

    matrices: dict[str, LowRank] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)
    unchanged: int = 0
    below: list[str] = field(default_factory=list)


def write_adapter(plan: MergePlan, folder: Path, memory: int = MEMORY, threads: int | None = None) -> MergeRun:
    """Writes the merged task vector as a LoRA adapter into an empty folder.

    A thread holds a matrix and its decomposition in memory, and so many threads run as fit; the factors, and the
    tensors that are saved as a whole, are held until they are written. The result is the same whatever the threads.

    Args:
        plan: a merge of task vectors.
        folder: an empty folder.
        memory: bytes of weights that are held at once.
        threads: that decompose matrices side by side; one per core by default.

    Raises:
        UserError: a changed tensor is of a kind that no adapter can hold, the models equal the base, or the disk
            refused.
    """
    start = time.perf_counter()
    keep_freed_memory()
    layout = AdapterLayout(plan)
    for tensor in plan.tensors:
        if tensor.method is not None and tensor.method.name == CONCATENATE:
            _check_adapters(tensor)
    count = _threads(plan, memory, threads)
    job, digests = MergeJob(plan, memory // (count + 1)), Digests()
    content = _Content()
    with one_thread_each(), progress_bar("decomposing", len(plan.tensors), "tensors") as advance:
        pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        try:
            futures = [pool.submit(_part, job, layout, tensor, digests) for tensor in plan.tensors]
            for tensor, future in zip(plan.tensors, futures, strict=True):
                _add(content, tensor, future.result())
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)
    if not content.matrices:
        what = "changes no matrix of a linear layer" if content.whole or content.dropped else "equals the base"
        raise UserError(f"{what}: there is nothing to extract", where=plan.recipe.models[0].model, fix="check the base")
    whole = content.whole | _companions(plan, content)
    outputs = _write_tensors(folder, layout.tensors(content.matrices, whole))
    config = layout.config(content.matrices, list(content.whole))
    write_atomically(folder / ADAPTER_CONFIG, json.dumps(config, indent=2, sort_keys=True).encode())
    _warn(content)
    return MergeRun(time.perf_counter() - start, peak_memory(), digests.values, outputs, _summary(content))


def estimate_adapter_seconds(plan: MergePlan, memory: int = MEMORY, threads: int | None = None) -> float:
    """Estimates a run by decomposing the matrix of middle size, and writing it nowhere."""
    matrices = [tensor for tensor in plan.tensors if _is_matrix(tensor)]
    if not matrices:
        return 0.0
    count = _threads(plan, memory, threads)
    sample, layout, job = middle_tensor(matrices), AdapterLayout(plan), MergeJob(plan, memory // (count + 1))
    with one_thread_each():
        start = time.perf_counter()
        _part(job, layout, sample)
        seconds = time.perf_counter() - start
    return seconds * sum(tensor.elements for tensor in matrices) / max(sample.elements, 1) / count


def _is_matrix(tensor: TensorPlan) -> bool:
    return len(tensor.shape) == 2 and not is_embedding(tensor.name)


def _threads(plan: MergePlan, memory: int, threads: int | None) -> int:
    """Returns how many threads may decompose matrices within the memory."""
    elements = [tensor.elements * (_COPIES if _is_matrix(tensor) else _COPIES_WHOLE) for tensor in plan.tensors]
    largest = max(elements) * torch.float32.itemsize
    return max(1, min(threads or len(os.sched_getaffinity(0)), memory // max(largest, 1)))


@dataclass(frozen=True)
class _Whole:
    """A changed tensor that is not a matrix of a linear layer: its new value, and the squared norm of the change."""

    value: Tensor
    change: float


def _part(
    job: MergeJob, layout: AdapterLayout, tensor: TensorPlan, digests: Digests | None = None
) -> LowRank | _Whole | None:
    """Returns what the adapter holds of one tensor; None if it is unchanged."""
    if tensor.method is None or tensor.base is None or tensor.low_rank is None:
        raise UserError(
            f"tensor {shorten(tensor.name)} holds integers, which no adapter changes",
            where=tensor.inputs[0].source.name,
            fix="merge into a model, without as_adapter",
        )
    vector = job.task_vector(tensor, digests)
    if not vector.any():
        return None
    if layout.is_factored(tensor.name) and not (tensor.method.name == CONCATENATE and _is_whole(tensor)):
        dtype = DTYPES[job.plan.recipe.dtype or "float32"]
        if tensor.method.name == CONCATENATE:
            return _concatenated(tensor, dtype)
        seed = job.plan.recipe.seed + zlib.crc32(tensor.name.encode())
        return truncated_svd(vector, tensor.low_rank["rank"], tensor.low_rank["energy"], seed % 2**32, dtype)
    change = float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2
    return _Whole((vector + _base_values(tensor)).to(tensor.dtype), change)


def _base_values(tensor: TensorPlan) -> Tensor:
    assert tensor.base is not None
    stored = torch.empty(tensor.elements, dtype=tensor.base.source.dtype(tensor.base.tensor))
    tensor.base.source.read(tensor.base.tensor, 0, stored)
    return stored.view(tensor.shape).float()


def _companions(plan: MergePlan, content: _Content) -> dict[str, Tensor]:
    """Returns the unchanged tensors of modules that are saved whole, without which peft does not load these."""
    saved = {name.rpartition(".")[0] for name in content.whole} - content.matrices.keys()
    return {
        tensor.name: _base_values(tensor).to(tensor.dtype)
        for tensor in plan.tensors
        if tensor.name.rpartition(".")[0] in saved and tensor.name not in content.whole
    }


def _check_adapters(tensor: TensorPlan) -> None:
    """Raises a UserError unless all inputs are adapters on the base."""
    assert tensor.base is not None
    base = tensor.base.source.location
    for entry in tensor.inputs:
        source = entry.source
        if not isinstance(source, AdaptedModel):
            raise UserError(
                f"`{source.name}` is not an adapter, and only adapters are concatenated",
                where="models",
                fix="extract_lora makes an adapter of a model; task_arithmetic with as_adapter adds both",
            )
        if os.path.realpath(source.base_location) != os.path.realpath(base):
            raise UserError(
                f"`{source.name}` is an adapter on {source.base_location}, and the base is {base}",
                where="base",
                fix="name the model that all adapters were trained on",
            )


def _adapters(tensor: TensorPlan) -> list[AdaptedModel]:
    return [entry.source for entry in tensor.inputs if isinstance(entry.source, AdaptedModel)]


def _is_whole(tensor: TensorPlan) -> bool:
    return any(adapter.holds_whole(tensor.name) for adapter in _adapters(tensor))


def _concatenated(tensor: TensorPlan, dtype: torch.dtype) -> LowRank:
    weights = tensor.options.get("weight", (1.0,) * len(tensor.inputs))
    total = sum(weights) if tensor.options.get("normalize") else 1.0
    factors, coefficients = [], []
    for adapter, weight in zip(_adapters(tensor), weights, strict=True):
        pair = adapter.factors(tensor.name)
        if pair is not None:
            factors.append(pair)
            coefficients.append(weight / total)
    return concatenate(factors, coefficients, dtype)


def _add(content: _Content, tensor: TensorPlan, part: LowRank | _Whole | None) -> None:
    if part is None:
        content.unchanged += 1
    elif isinstance(part, LowRank):
        module = tensor.name.removesuffix(".weight")
        content.matrices[module] = part
        goal = (tensor.low_rank or {}).get("energy", 1.0)
        if goal < 1 and _energy(part.size, part.error) < goal - _ROUNDING:
            content.below.append(module)
    elif tensor.low_rank is not None and tensor.low_rank["others"] == "drop":
        content.dropped[tensor.name] = part.change
    else:
        content.whole[tensor.name] = part.value


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Writes the adapter's file, reads it back, and returns the digest (XXH3, 128 bits) of each tensor."""
    from safetensors.torch import load_file, save_file

    for name, tensor in tensors.items():
        if not is_finite(tensor):
            what = f"tensor {shorten(name)} has numbers beyond {number_name(tensor.dtype)}'s"
            raise UserError(what, where="the result", fix="choose smaller weights, or dtype: float32")
    file = folder / ADAPTER_WEIGHTS
    with disk_errors(folder):
        save_file(dict(sorted(tensors.items())), file, {"format": "pt"})
        stored = load_file(file)
    for name, tensor in tensors.items():
        if not torch.equal(stored[name], tensor):
            raise WorkError(f"{file}: tensor {name} reads other than it was written")
    return {name: _digest(tensor) for name, tensor in sorted(stored.items())}


def _digest(tensor: Tensor) -> str:
    return xxhash.xxh3_128(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _summary(content: _Content) -> dict[str, Any]:
    size = math.fsum(matrix.size for matrix in content.matrices.values())
    error = math.fsum(matrix.error for matrix in content.matrices.values())
    return {
        "energy": _energy(size, error),
        "relative_error": _relative_error(size, error),
        "parameters": sum(m.down.numel() + m.up.numel() for m in content.matrices.values()),
        "unchanged": content.unchanged,
        "below_energy": content.below,
        "saved_whole": list(content.whole),
        "dropped": {name: math.sqrt(change) for name, change in content.dropped.items()},
        "matrices": {
            module: {
                "rank": matrix.rank,
                "energy": _energy(matrix.size, matrix.error),
                "relative_error": _relative_error(matrix.size, matrix.error),
            }
            for module, matrix in content.matrices.items()
        },
    }


def _energy(size: float, error: float) -> float:
    return 1 - error / size if size else 1.0


def _relative_error(size: float, error: float) -> float:
    return math.sqrt(error / size) if size else 0.0


def _warn(content: _Content) -> None:
    if content.below:
        log.warning(
            "%d of %d matrices keep less than the energy: the rank is too low, first of %s",
            len(content.below),
            len(content.matrices),
            content.below[0],
        )
    if content.whole:
        log.warning("%d changed tensors are saved whole: %s", len(content.whole), _names(list(content.whole)))
    if content.dropped:
        names, norm = _names(list(content.dropped)), math.sqrt(math.fsum(content.dropped.values()))
        log.warning("%d changed tensors are dropped, of norm %.3g: %s", len(content.dropped), norm, names)


def _names(tensors: Sequence[str], most: int = 3) -> str:
    more = f" and {len(tensors) - most} more" if len(tensors) > most else ""
    return ", ".join(tensors[:most]) + more
