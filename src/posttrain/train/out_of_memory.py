"""Running out of memory: how it is told from other errors, and what is given back before another try."""

import gc

import torch

_CPU = ("can't allocate memory", "not enough memory")
"""What torch's allocator for CPUs says, on POSIX systems and elsewhere; it has no error class for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: an accelerator's, torch's on a CPU, or Python's own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return ("DefaultCPUAllocator" in text and any(words in text for words in _CPU)) or "CUDA out of memory" in text


def give_back() -> None:
    """Free what nobody holds any more; call it outside of the ``except`` that holds the error's frames."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
