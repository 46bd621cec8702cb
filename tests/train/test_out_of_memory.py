"""Detection of out-of-memory errors."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from posttrain.models.loading import is_out_of_memory
from posttrain.store.errors import WorkError
from posttrain.train.api import train
from posttrain.train.optim.master_weights import MasterWeights
from posttrain.train.out_of_memory import empty_cache


def test_a_real_out_of_memory_error_is_detected() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        MemoryError("x"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_other_out_of_memory_errors_are_detected(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("DefaultCPUAllocator: not a multiple of the alignment"),
        ValueError("can't allocate memory"),
        OSError(28, "No space left on device"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_an_optimizer_without_memory_for_its_state_ends_in_advice(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(weights: MasterWeights, *arguments: object, **options: object) -> None:
        torch.empty(1 << 55, dtype=torch.uint8)

    monkeypatch.setattr(MasterWeights, "step", step)
    with pytest.raises(WorkError, match="in the optimizer's state; set train"):
        train(tiny_model, [{"prompt": "a", "completion": "b"}], tmp_path / "out")


@pytest.mark.slow
def test_empty_cache_frees_reference_cycles() -> None:
    class Loop:
        def __init__(self) -> None:
            self.itself = self

    gc.disable()
    try:
        reference = weakref.ref(Loop())
        assert reference() is not None
        empty_cache()
        assert reference() is None
    finally:
        gc.enable()
