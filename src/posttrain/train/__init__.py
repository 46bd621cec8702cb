"""Training: ``posttrain.train.train`` is ``posttrain train`` in Python; the loop's stage calls `stage.train`."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "train":  # late, as it loads torch
        from posttrain.train.api import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
