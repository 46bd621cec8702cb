"""The draw of a record: a number that its group or its input decides, and nothing else."""

import hashlib
from collections.abc import Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STEP = 2.0**-48
"""Draws are whole multiples of this."""


def draws(inputs: Sequence[str], groups: Sequence[str | None] | None, seed: int) -> Floats:
    """Float64 [N] in [0, 1): of the group, or of the input where there is none.

    It is the first 48 bits of the SHA-256 of the seed and the name, so it is the same on every machine and in every
    release.
    """
    by_group, by_input = hashlib.sha256(f"{seed}\0group\0".encode()), hashlib.sha256(f"{seed}\0input\0".encode())
    first_bits = bytearray()
    for name, group in zip(inputs, groups if groups is not None else repeat(None, len(inputs)), strict=True):
        state = (by_input if group is None else by_group).copy()
        state.update((name if group is None else group).encode())
        first_bits += state.digest()[:6]
    octets = np.frombuffer(first_bits, dtype=np.uint8).reshape(-1, 6).astype(np.float64)
    return np.asarray(octets @ (256.0 ** np.arange(5, -1, -1)) * STEP, dtype=np.float64)


def by_draw(draw: Floats, below_test: Floats | float, below_validation: Floats | float) -> npt.NDArray[np.int8]:
    """Index of the split of each draw, int8 [N]: test begins at 0, validation follows, train is the rest."""
    return np.where(draw < below_test, 2, np.where(draw < below_validation, 1, 0)).astype(np.int8)
