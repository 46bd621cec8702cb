"""The bytes of a tensor, and their checksum."""

import hashlib

import torch
from torch import Tensor


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, of any dtype and shape, without a copy; writable."""
    return tensor.flatten().view(torch.uint8).numpy().data


def digest(tensor: Tensor) -> str:
    """SHA-256 of the bytes of a contiguous tensor in host memory, 64 hex characters; lets other threads run."""
    return hashlib.sha256(raw(tensor)).hexdigest()
