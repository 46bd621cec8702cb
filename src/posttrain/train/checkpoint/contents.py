"""What a checkpoint holds."""

import json
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from posttrain.train.watch.values import StepValues


@dataclass(frozen=True)
class Checkpoint:
    """All that a training goes on from.

    Args:
        tensors: what the optimiser and the random generators hold, by name.
        state: everything else that is JSON.
        steps: what each step so far has measured. Of a list that grew since it was saved only the growth is written.
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    steps: list[StepValues] = field(default_factory=list)


def state_bytes(state: dict[str, Any]) -> bytes:
    """The JSON text of the state as it is now. Tuples become lists; NaN and infinities are kept.

    Raises:
        TypeError: something in it has no JSON form, or a key is no string and would come back as one.
    """
    _check_keys(state, "state")
    return json.dumps(state).encode()


def _check_keys(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place}: key {key!r} is no string")
            _check_keys(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner, f"{place}[]")
