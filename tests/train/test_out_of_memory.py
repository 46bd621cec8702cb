"""Detection of out-of-memory errors."""

import gc
import weakref

import pytest
import torch

from posttrain.models.loading import is_out_of_memory
from posttrain.train.out_of_memory import empty_cache


def test_a_real_out_of_memory_error_is_detected() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(), MemoryError("x")]
)
def test_other_out_of_memory_errors_are_detected(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("DefaultCPUAllocator: not a multiple of the alignment"),
        ValueError("can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


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
