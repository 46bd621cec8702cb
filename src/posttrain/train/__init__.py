"""Training: ``posttrain.train.train`` is ``posttrain train`` in Python; the loop's stage calls `stage.train`."""

from typing import TYPE_CHECKING

from posttrain.store.extensions import lazy_exports

if TYPE_CHECKING:
    from posttrain.train.api import train

__all__ = ["train"]

__getattr__ = lazy_exports(__name__, {"train": "api"})
