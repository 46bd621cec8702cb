"""Choose what to label, what to train on and in which order."""

from typing import TYPE_CHECKING

from posttrain.store.extensions import lazy_exports

if TYPE_CHECKING:
    from posttrain.select.selectors.registry import select

__all__ = ["select"]

__getattr__ = lazy_exports(__name__, {"select": "selectors.registry"})
