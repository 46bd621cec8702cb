"""Training checkpoints that lose nothing: written whole or not at all, in the background, verified and pruned."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.train.checkpoint.checkpoints import Checkpoints
    from posttrain.train.checkpoint.config import CheckpointConfig
    from posttrain.train.checkpoint.format import Checkpoint

__all__ = ["Checkpoint", "CheckpointConfig", "Checkpoints"]

_HOMES = {"Checkpoint": "format", "CheckpointConfig": "config", "Checkpoints": "checkpoints"}


def __getattr__(name: str) -> Any:
    # The config is read where nothing is trained, so torch is loaded only with what needs it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
