"""Telling that memory ran out from other errors."""

import gc
import weakref

import pytest
import torch

from posttrain.train.out_of_memory import empty_cache, is_out_of_memory


def test_a_real_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(), MemoryError("x")]
)
def test_others_that_say_so(error: BaseException) -> None:
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
def test_what_is_something_else(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_what_nobody_holds_is_given_back() -> None:
    class Loop:
        def __init__(self) -> None:
            self.itself = self

    gc.disable()
    try:
        watched = weakref.ref(Loop())
        assert watched() is not None
        empty_cache()
        assert watched() is None
    finally:
        gc.enable()
