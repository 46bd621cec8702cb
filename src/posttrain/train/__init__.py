"""Training: ``posttrain.train.train`` is what the loop's stage and ``posttrain train`` call."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "train":  # late, as it loads torch
        from posttrain.train.stage import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
