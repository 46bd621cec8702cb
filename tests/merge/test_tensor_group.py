"""Blocks of one tensor of every model, and their statistics."""

import numpy as np
import pytest
import torch
import xxhash

from posttrain.merge.tensor_group import TensorGroup
from posttrain.merge.tensor_reader import Arena, Digests, TensorInput
from posttrain.store.errors import UserError
from posttrain.testing.merge_methods import SHAPES, MemorySource, random_models


def group_of(name: str, memory: int, digests: Digests | None = None, task_vectors: bool = False) -> TensorGroup:
    models, base = random_models(3)
    inputs = [TensorInput(MemorySource(f"model {number}", model), name) for number, model in enumerate(models)]
    reference = TensorInput(MemorySource("base", base), name)
    return TensorGroup(name, inputs, reference, Arena(memory), 0, digests, task_vectors=task_vectors)


@pytest.mark.parametrize("memory", [0, 1 << 30])
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_are_the_tensor_and_digests_those_of_its_bytes(name: str, memory: int) -> None:
    models, base = random_models(3)
    digests = Digests()
    group = group_of(name, memory, digests, task_vectors=True)
    # Twice, as only the first pass may count.
    for _ in range(2):
        blocks = [block.values.clone() for block in group.blocks()]
    expected = torch.stack([(model[name] - base[name]).reshape(group.rows, group.columns) for model in models])
    assert torch.equal(torch.cat(blocks, 1) if blocks else expected, expected)
    contents = {"base": base, **{f"model {number}": model for number, model in enumerate(models)}}
    assert digests.values == {
        (source, name): xxhash.xxh3_128(tensors[name].numpy().tobytes()).hexdigest()
        for source, tensors in contents.items()
    }


@pytest.mark.parametrize("name", SHAPES)
def test_gram_matrix_is_that_of_float64(name: str) -> None:
    models, base = random_models(3)
    flat = np.stack([(model[name] - base[name]).double().numpy().ravel() for model in models])
    gram = group_of(name, 1 << 30, task_vectors=True).gram()
    np.testing.assert_allclose(gram, flat @ flat.T, rtol=0, atol=2e-7 * max((flat**2).sum(), 1e-30))
    assert np.array_equal(gram, group_of(name, 0, task_vectors=True).gram())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("model", [0, 1, "base"])
def test_numbers_that_are_not_finite_are_named(value: float, model: int | str) -> None:
    (first, second), base = random_models(2, {"weight": (300, 512)})
    broken = base if model == "base" else (first, second)[int(model)]
    broken["weight"][299, 511] = value
    sources = [MemorySource("model 0", first), MemorySource("model 1", second)]
    group = TensorGroup(
        "weight",
        [TensorInput(source, "weight") for source in sources],
        TensorInput(MemorySource("base", base), "weight"),
        Arena(0),
        task_vectors=True,
    )
    with pytest.raises(UserError, match=f"{model}.*weight"):
        for _ in group.blocks():
            pass
