"""Merging task vectors of one tensor in memory, and the random numbers that a method draws for them."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.merge.methods.registry import load_method
from posttrain.merge.tensor_group import TensorGroup
from posttrain.merge.tensor_reader import Arena, TensorInput
from posttrain.testing.merge_methods import MemorySource

MergeVectors = Callable[..., np.ndarray]
RandomLevels = Callable[..., np.ndarray]


@pytest.fixture
def merge_vectors() -> MergeVectors:
    """Returns a function that merges task vectors with a base of zeros, and returns the merged task vector."""

    def merge(
        method: str,
        vectors: list[np.ndarray],
        *,
        name: str = "weight",
        seed: int = 0,
        memory: int = 1 << 30,
        **options: Any,
    ) -> np.ndarray:
        spec = load_method(method)
        spec.check_models(len(vectors))
        values = {option: parameter.default for option, parameter in spec.options.items()}
        values |= options
        values = {
            option: spec.read_option(option, _one_a_model(value, len(vectors)), len(vectors), option)
            for option, value in values.items()
        }
        tensors = [torch.from_numpy(np.asarray(vector, dtype=np.float32).copy()) for vector in vectors]
        inputs = [
            TensorInput(MemorySource(f"model {number}", {name: tensor}), name) for number, tensor in enumerate(tensors)
        ]
        base = TensorInput(MemorySource("base", {name: torch.zeros_like(tensors[0])}), name)
        group = TensorGroup(name, inputs, base, Arena(memory), seed=seed, task_vectors=True)
        function = spec.function(group, **values)
        parts: list[Tensor] = [function(block).clone() for block in group.blocks()]
        merged = torch.cat(parts) if parts else torch.empty(0)
        return merged.reshape(tensors[0].shape).double().numpy()

    return merge


def _one_a_model(value: Any, models: int) -> Any:
    return list(value) * models if isinstance(value, tuple) and len(value) == 1 else value


@pytest.fixture
def random_levels() -> RandomLevels:
    """Returns a function that draws the 16-bit random numbers of one model's block, as the engine seeds them."""

    def draw(shape: tuple[int, int], model: int, block: int = 0, name: str = "weight", seed: int = 0) -> np.ndarray:
        generator = np.random.SFC64([seed, zlib.crc32(name.encode()), model, block])
        count = shape[0] * shape[1]
        return generator.random_raw(-(-count // 4)).view(np.uint16)[:count].reshape(shape).astype(np.int64)

    return draw


@pytest.fixture
def vectors() -> list[np.ndarray]:
    """Returns three task vectors that float32 holds exactly."""
    generator = np.random.default_rng(7)
    return [generator.normal(size=(37, 53)).astype(np.float32).astype(np.float64) for _ in range(3)]


@pytest.fixture
def elect() -> Callable[..., np.ndarray]:
    """Returns steps 2 and 3 of TIES (Yadav et al. 2023) in float64, with weights."""

    def merge(weighted: list[np.ndarray], weight: list[float], normalize: bool, count: bool = False) -> np.ndarray:
        ballots = sum(np.sign(vector) if count else vector for vector in weighted)
        sign = np.where(ballots >= 0, 1.0, -1.0)
        agree = [vector * sign > 0 for vector in weighted]
        total = sum(np.where(mask, vector, 0.0) for vector, mask in zip(weighted, agree, strict=True))
        divisor = sum(mask * factor for mask, factor in zip(agree, weight, strict=True))
        merged = np.divide(total, divisor, where=np.abs(divisor) > 1e-6, out=np.array(total))
        return merged if normalize else total

    return merge
