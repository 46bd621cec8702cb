"""The state of every library's random generator, as tensors, so that a resumed training draws the same numbers.

Training itself draws from torch's. Python's and NumPy's are kept for what a model's or a library's code may draw.
"""

import logging
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("posttrain")

_CUDA = "random.cuda."


def random_state() -> dict[str, Tensor]:
    """Where the generators of Python, NumPy, torch and each CUDA device stand, by names that begin with ``random.``."""
    _, words, waiting = random.getstate()
    twister = np.random.get_state()
    assert isinstance(twister, tuple)
    _, key, *rest = twister
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "random.python": torch.tensor(words),
        # A second normal number is drawn with the first, and waits.
        "random.python.normal": torch.tensor([] if waiting is None else [waiting], dtype=torch.float64),
        "random.numpy": torch.from_numpy(key.astype(np.int64)),
        "random.numpy.rest": torch.tensor([float(value) for value in rest], dtype=torch.float64),
        "random.torch": torch.get_rng_state(),
        **{f"{_CUDA}{number}": state for number, state in enumerate(cuda)},
    }


def set_random_state(tensors: Mapping[str, Tensor]) -> None:
    """Put all generators where `random_state` found them; what else is in ``tensors`` is not looked at.

    On other CUDA devices than it was taken on nothing can be the same: that is said in the log.
    """
    waiting = tensors["random.python.normal"].tolist()
    random.setstate((3, tuple(tensors["random.python"].tolist()), waiting[0] if waiting else None))
    place, has_normal, normal = tensors["random.numpy.rest"].tolist()
    key = tensors["random.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(place), int(has_normal), normal))
    torch.set_rng_state(tensors["random.torch"])
    saved = sorted(name for name in tensors if name.startswith(_CUDA))
    here = [f"{_CUDA}{number}" for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    for number, name in enumerate(here):
        if name in tensors:
            torch.cuda.set_rng_state(tensors[name], number)
    if saved != sorted(here):
        log.warning("the checkpoint is of %d CUDA devices, here are %d: dropout will differ", len(saved), len(here))
